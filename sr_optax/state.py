"""Reading and replacing the shadow weights inside any optax state."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from sr_optax import link as link_lib
from sr_optax import noise, paths, residual, rounding
from sr_optax.chain import Chain


def shadow_params(opt_state, params):
  """Returns the FP32 weights behind the visible ones, whatever the storage.

  Args:
    opt_state: any optax state that holds the state of a rounding link, at any
      depth (chain, masked, partition, MultiSteps, inject_hyperparams, NNX).
    params: the visible weights. Leaves are matched by path, so any view of
      them will do.

  Returns:
    A tree like `params`: float32 for every weight in bfloat16 or float16;
    other leaves as they are. Weights that were replaced from outside by
    anything but a neighbour of their shadow count as their own shadow.

  Raises:
    ValueError: if `opt_state` holds no rounding link, or a leaf's shape
      differs.
  """
  named, treedef = paths.flatten(params)
  shadow = {}
  for state in find_links(opt_state):
    stored = {path for path, _ in paths.flatten(state.shadow)[0]}
    mine = [(path, p) for path, p in named if path in stored]
    shadow |= {path: s for path, s, _ in link_lib.reconstruct(state, mine)}
  return treedef.unflatten(
    [shadow[path] if path in shadow else _widen(p) for path, p in named]
  )


def resync(opt_state, params):
  """Adopts weights that were replaced from outside.

  Afterwards `shadow_params(opt_state, params) == params`, bit for bit.

  Args:
    opt_state: as in `shadow_params`.
    params: the new visible weights.

  Returns:
    The state with its shadow replaced. Moments and counters stay as they are.

  Raises:
    ValueError: as `shadow_params`.
  """
  named = dict(paths.flatten(params)[0])

  def adopt(state):
    stored, _ = paths.flatten(state.shadow)
    values = {}
    for path, s in stored:
      if path not in named or named[path].shape != s.shape:
        got = named[path].shape if path in named else 'no such leaf'
        raise ValueError(f'parameter {path!r}: expected {s.shape}, got {got}')
      if s.dtype == jnp.uint16:
        values[path] = jnp.zeros_like(s)
      else:
        values[path] = link_lib.to_float32(named[path])
    return state._replace(shadow=paths.replace(state.shadow, values))

  return map_links(adopt, opt_state)


def init_from_shadow(
  tx: optax.GradientTransformation,
  shadow,
  *,
  dtype: DTypeLike | None = None,
) -> tuple:
  """Starts from FP32 weights: migration, restructuring, lossless restore.

  Args:
    tx: a transform that contains a rounding link.
    shadow: tree of FP32 weights; leaves of other types pass through.
    dtype: of the visible weights; by default the link's where `tx` is a link
      or an `sr_optax.chain`, else bfloat16.

  Returns:
    `(params, opt_state)` with `shadow_params(opt_state, params) == shadow`.
    (Values beyond the target's range saturate. Without a shadow in the state
    the weights are just rounded.) An `sr_optax.chain` initialises its inner
    transforms with `shadow`; others see the rounded weights.

  Raises:
    ValueError: if `tx` keeps no state of a rounding link.
  """
  part = getattr(tx.update, '__self__', None)
  link = part.link if isinstance(part, Chain) else part
  if dtype is None:
    dtype = link.target if isinstance(link, link_lib.Link) else jnp.bfloat16
  target = rounding.check_target(dtype)
  named, treedef = paths.flatten(shadow)
  weights = {
    path: rounding.saturate(link_lib.to_float32(s), target)
    for path, s in named
    if s.dtype in (jnp.float32, target)
  }

  def visible(keys: dict):
    return treedef.unflatten(
      [
        link_lib.round_shadow(weights[path], target, keys.get(path))
        if path in weights
        else s
        for path, s in named
      ]
    )

  opt_state = tx.init(visible({}))
  if isinstance(part, Chain):
    fp32 = treedef.unflatten([weights.get(path, s) for path, s in named])
    opt_state = (*part.inner.init(fp32), opt_state[-1])
  keys = {}
  for state in find_links(opt_state):
    if isinstance(state, link_lib.StochasticRoundingState):
      mine = list(weights)
      if state.shadow is not None:
        mine = [path for path, _ in paths.flatten(state.shadow)[0]]
      keys |= noise.leaf_keys(state.last_key, mine)

  def fill(state):
    values = {
      path: residual.split(weights[path])
      if s.dtype == jnp.uint16
      else jnp.array(weights[path], copy=True)
      for path, s in paths.flatten(state.shadow)[0]
    }
    return state._replace(shadow=paths.replace(state.shadow, values))

  return visible(keys), map_links(fill, opt_state)


def apply_updates(params, updates, opt_state):
  """As `optax.apply_updates`, but writes the rounded weights themselves.

  Exact without exception where the state keeps a float32 shadow. With
  `residual16` or no shadow the sum `param + update` is what there is; it lacks
  the sign of a zero that a weight of the other sign rounds to, weights that
  shrink by more than a factor of 2^16 in one step (FP16: 2^13), and differences
  that overflow FP32.

  Args:
    params: the weights before the step.
    updates: what `tx.update` emitted.
    opt_state: the state *after* the step.

  Returns:
    The new weights, dtypes of `params`.

  Raises:
    ValueError: if the trees differ, or `opt_state` holds no rounding link.
  """
  named, treedef = paths.flatten(params)
  steps = link_lib.match(paths.flatten(updates)[0], named, 'updates', 'params')
  exact = {}
  for state in find_links(opt_state):
    stored = [
      (path, s)
      for path, s in paths.flatten(state.shadow)[0]
      if s.dtype == jnp.float32
    ]
    keys = {}
    if isinstance(state, link_lib.StochasticRoundingState):
      keys = noise.leaf_keys(state.last_key, [path for path, _ in stored])
    exact |= {path: (s, keys.get(path)) for path, s in stored}

  def apply(path: str, p: jax.Array) -> jax.Array:
    u = steps[path]
    if path not in exact:
      return optax.apply_updates(p, u)
    q = link_lib.round_shadow(exact[path][0], p.dtype, exact[path][1])
    bits = lax.bitcast_convert_type(u.astype(jnp.float32), jnp.uint32)
    return jnp.where((bits & jnp.uint32(0x7FFFFFFF)) == 0, p, q)

  return treedef.unflatten([apply(path, p) for path, p in named])


def find_links(opt_state) -> list[link_lib.LinkState]:
  """All rounding-link states in a state; ValueError if there is none."""
  found = []
  map_links(lambda state: found.append(state) or state, opt_state)
  return found


def map_links(
  function: Callable[[link_lib.LinkState], link_lib.LinkState], opt_state
):
  """Applies a function to every rounding-link state inside a state.

  Also finds a link's state where its type was lost and its fields remain as a
  mapping (`nnx.state(optimizer)`, a checkpoint restored without a target).
  """
  count = 0

  def visit(node):
    nonlocal count
    kind = _link_type(node)
    if kind is None:
      return node
    count += 1
    typed = isinstance(node, kind)
    fields = node._asdict() if typed else {name: node[name] for name in node}
    # Scalars may still be wrapped (NNX variables): take them out, put back.
    scalars = {
      name: jax.tree.flatten(x)
      for name, x in fields.items()
      if name != 'shadow'
    }
    bare = {name: leaves[0] for name, (leaves, _) in scalars.items()}
    new = function(kind(**bare, shadow=fields.get('shadow')))
    for name, (_, treedef) in scalars.items():
      fields[name] = treedef.unflatten([getattr(new, name)])
    if 'shadow' in fields:
      fields['shadow'] = new.shadow
    if typed:
      return kind(**fields)
    copy = jax.tree.map(lambda x: x, node)
    for name, value in fields.items():
      copy[name] = value
    return copy

  result = jax.tree.map(
    visit, opt_state, is_leaf=lambda node: _link_type(node) is not None
  )
  if not count:
    raise ValueError(
      'the state holds no rounding link: expected a state of a transform that '
      'contains stochastic_rounding(...) or nearest_rounding(...), got '
      f'{type(opt_state).__name__}'
    )
  return result


def _link_type(node) -> type | None:
  kinds = (link_lib.StochasticRoundingState, link_lib.NearestRoundingState)
  for kind in kinds:
    if isinstance(node, kind):
      return kind
    if isinstance(node, Mapping) and set(node) == set(kind._fields):
      return kind
  # An NNX state has no entry for a shadow that is None.
  if isinstance(node, Mapping) and set(node) == {'count', 'key', 'last_key'}:
    return link_lib.StochasticRoundingState
  return None


def _widen(p):
  small = p.dtype in (jnp.bfloat16, jnp.float16)
  return link_lib.to_float32(p) if small else p
