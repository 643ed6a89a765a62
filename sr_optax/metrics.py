"""What rounding does to a step: sticking, noise and range, inside jit."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from sr_optax import link as link_lib
from sr_optax import paths
from sr_optax import state as state_lib

_U32 = jnp.uint32
_LARGEST = {jnp.dtype(jnp.bfloat16): 0x7F7F, jnp.dtype(jnp.float16): 0x7BFF}


def sticking_metrics(
  old_params, old_state, new_params, new_state, *, start_params=None
) -> dict:
  """Measures how the visible weights of one step follow their shadow.

  Pure and made for jit (call it in the jitted step, where the old parameters
  still exist although they are donated): one pass over the weights, whose
  sums all come out of a single loop. Weights that no link rounds are left out.

  Args:
    old_params: the visible weights before the step.
    old_state: the optimizer state before the step: any state that holds the
      state of a rounding link, at any depth.
    new_params: the visible weights after the step.
    new_state: the optimizer state after the step.
    start_params: weights at the start of the run (visible ones or FP32), for
      `displacement_slope`.

  Returns:
    A dict of float32 scalars over all rounded weights, and under 'leaves' a
    dict of the same for each leaf path:

    - `changed_fraction`: share of weights whose visible bits changed.
    - `stuck_fraction`: share of weights whose shadow moved while their visible
      bits did not.
    - `least_changed_fraction`: share of weights that must change on average for
      the visible ones to follow. A shadow that moves by the share f of a grid
      step makes its weight change with probability min(f, 1) at least, whatever
      the noise; this is its mean. Sticky noise reaches it, fresh noise changes
      more, nearest rounding changes less while weights stick.
    - `foreign_count`: weights that were replaced from outside before the step
      (no neighbour of their old shadow, adopted as their own shadow). Seen
      with a float32 shadow only, else 0.
    - `noise_ratio`: ||dvisible - dshadow|| / ||dshadow||, L2 norms of the step:
      rounding noise against update. 0 if neither moved, inf if only the
      visible weights did.
    - `nan_count`: visible weights that are NaN after the step.
    - `overflow_count`: those that are +-Inf or +-the largest finite value,
      where rounding saturates.
    - `displacement_slope`, with `start_params`: least-squares slope through 0
      of visible against shadow displacement from the start,
      sum(dvisible * dshadow) / sum(dshadow^2). 1: nothing sticks; 0: nothing
      is seen. NaN while no shadow has moved.

    Counts are exact for leaves of less than 2^32 weights, up to the rounding
    of the float32 result. Fractions of nothing (leaves of size 0) are 0.
    Weights that are not finite before or after are left out of ratio and slope.

    Without a shadow (`shadow=None`) the visible weights are their own shadow:
    nothing is stuck, the noise is 0 and the slope 1 by construction, and all
    BF16 and FP16 leaves count as rounded, since the state names none.

  Raises:
    ValueError: if a state holds no rounding link or trees differ in structure.

  Example:
    >>> import jax.numpy as jnp, optax, sr_optax
    >>> params = {'w': jnp.ones((3, 5), jnp.bfloat16)}
    >>> tx = sr_optax.chain(optax.sgd(1e-4), sr_optax.nearest_rounding())
    >>> state = tx.init(params)
    >>> updates, new_state = tx.update(params, state, params)
    >>> new_params = optax.apply_updates(params, updates)
    >>> metrics = sr_optax.sticking_metrics(
    ...   params, state, new_params, new_state)
    >>> float(metrics['changed_fraction']), float(metrics['stuck_fraction'])
    (0.0, 1.0)
    >>> float(metrics['leaves']['w']['noise_ratio'])
    1.0
  """
  old, _ = paths.flatten(old_params)
  new = link_lib.match(
    paths.flatten(new_params)[0], old, 'new_params', 'old_params'
  )
  start = None
  if start_params is not None:
    start = link_lib.match(
      paths.flatten(start_params)[0], old, 'start_params', 'old_params'
    )
  before = _shadows(old_state, old)
  after = _shadows(new_state, [(path, new[path]) for path, _ in old])
  sums = {}
  for path, p in old:
    if path in before and path in after:
      first = None if start is None else start[path]
      sums[path] = _leaf_sums(p, before[path], new[path], after[path], first)
  sizes = {path: float(new[path].size) for path in sums}
  zeros = dict.fromkeys(_names(start is not None), jnp.float32(0))
  total = {
    name: sum((leaf[name] for leaf in sums.values()), start=zero)
    for name, zero in zeros.items()
  }
  return _summary(total, sum(sizes.values())) | {
    'leaves': {path: _summary(leaf, sizes[path]) for path, leaf in sums.items()}
  }


def _shadows(opt_state, named) -> dict:
  """{path: (FP32 shadow, foreign or None)} of the leaves that links round."""
  found, unstored = {}, False
  for state in state_lib.find_links(opt_state):
    stored = {path for path, _ in paths.flatten(state.shadow)[0]}
    unstored |= state.shadow is None
    mine = [(path, p) for path, p in named if path in stored]
    for path, s, foreign in link_lib.reconstruct(state, mine):
      found[path] = (s, foreign)
  if unstored:
    for path, p in named:
      if path not in found and p.dtype in _LARGEST:
        found[path] = (link_lib.to_float32(p), None)
  return found


def _names(with_start: bool) -> list[str]:
  counts = ['changed', 'stuck', 'foreign', 'nan', 'overflow']
  moves = ['least', 'noise', 'step'] + (['along', 'displacement'] * with_start)
  return counts + moves


def _leaf_sums(old, before, new, after, start) -> dict[str, jax.Array]:
  """All sums over one leaf, float32 scalars, named as in `_names`."""
  (s0, foreign), (s1, _) = before, after
  v0, v1 = link_lib.to_float32(old), link_lib.to_float32(new)
  bits = lax.bitcast_convert_type(new, jnp.uint16)
  magnitude = bits & jnp.uint16(0x7FFF)
  largest = jnp.uint16(_LARGEST[new.dtype])
  changed = bits != lax.bitcast_convert_type(old, jnp.uint16)
  moved = lax.bitcast_convert_type(s0, _U32) != (
    lax.bitcast_convert_type(s1, _U32)
  )
  nan = magnitude > largest + jnp.uint16(1)
  counts = [
    changed,
    moved & ~changed,
    jnp.zeros_like(changed) if foreign is None else foreign,
    nan,
    (magnitude >= largest) & ~nan,
  ]
  moves = [_grid_steps(s0, s1, new.dtype)]
  moves += _squares((v1 - v0) - (s1 - s0), s1 - s0)
  if start is not None:
    first = link_lib.to_float32(start)
    moves += _squares(v1 - first, s1 - first, product=True)
  terms = [count.astype(_U32) for count in counts] + moves
  return dict(zip(_names(start is not None), _sum_all(terms), strict=True))


def _grid_steps(s0, s1, dtype) -> jax.Array:
  """How far shadows move, in grid steps at s0, at most 1; 0 if not finite."""
  limits = jnp.finfo(dtype)
  power = lax.bitcast_convert_type(s0, _U32) & _U32(0x7F800000)
  power = lax.bitcast_convert_type(power, jnp.float32)  # 2^floor(log2 |s0|)
  power = jnp.maximum(power, jnp.float32(limits.tiny))
  steps = jnp.minimum(jnp.abs(s1 - s0) * 2.0**limits.nmant / power, 1.0)
  return jnp.where(jnp.isfinite(s0) & jnp.isfinite(s1), steps, 0.0)


def _squares(x, y, product: bool = False) -> list[jax.Array]:
  """[x^2 (or x * y), y^2], 0 where either is not finite."""
  ok = jnp.isfinite(x) & jnp.isfinite(y)
  return [jnp.where(ok, a, 0.0) for a in (x * y if product else x * x, y * y)]


def _sum_all(terms: list[jax.Array]) -> list[jax.Array]:
  """Sums uint32 and float32 arrays of one shape; float32 scalars.

  One variadic reduction over the last axis, so that every backend reads the
  weights once; what is left is one value a row. Counts stay uint32 while they
  cannot overflow.
  """
  shape = terms[0].shape
  if shape:
    zeros = [x.dtype.type(0) for x in terms]
    terms = lax.reduce(
      tuple(terms),
      tuple(zeros),
      lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
      (len(shape) - 1,),
    )
  if math.prod(shape) >= 2**32:
    terms = [x.astype(jnp.float32) for x in terms]
  return [jnp.sum(x, dtype=x.dtype).astype(jnp.float32) for x in terms]


def _summary(sums: dict[str, jax.Array], size: float) -> dict[str, jax.Array]:
  count = max(size, 1.0)
  noise, step = sums['noise'], sums['step']
  result = {
    'changed_fraction': sums['changed'] / count,
    'stuck_fraction': sums['stuck'] / count,
    'least_changed_fraction': sums['least'] / count,
    'foreign_count': sums['foreign'],
    'noise_ratio': jnp.where(noise == 0, 0.0, jnp.sqrt(noise / step)),
    'nan_count': sums['nan'],
    'overflow_count': sums['overflow'],
  }
  if 'along' in sums:
    result['displacement_slope'] = sums['along'] / sums['displacement']
  return {name: value.astype(jnp.float32) for name, value in result.items()}
