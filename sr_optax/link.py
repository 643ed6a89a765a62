"""The last link of an optax chain: FP32 shadow in, rounded weights out."""

import dataclasses
import math
import operator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from sr_optax import noise, paths, residual, rounding

_BEFORE_FIRST = 2**32 - 1  # epoch of the noise that no step uses


class StochasticRoundingState(NamedTuple):
  """State of `stochastic_rounding`.

  Visible weights = `stochastic_round_tree(last_key, shadow_params(...))`.
  """

  count: chex.Array
  """int32 scalar, updates applied so far."""
  key: chex.Array
  """uint32[2], the key of the run."""
  last_key: chex.Array
  """uint32[2], the key folded with the epoch, which made today's weights."""
  shadow: Any
  """Tree like the parameters: float32, or uint16 (`residual16`), or None."""


class NearestRoundingState(NamedTuple):
  """State of `nearest_rounding`."""

  count: chex.Array
  """int32 scalar, updates applied so far."""
  shadow: Any
  """Tree like the parameters: float32, or None."""


LinkState = StochasticRoundingState | NearestRoundingState


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
  """What both links share; `words` is None for round-to-nearest."""

  target: jnp.dtype
  shadow: str | None
  words: jax.Array | None = None
  refresh_every: float = 1

  def init(self, params) -> LinkState:
    """Starts with a shadow equal to the weights."""
    named, treedef = paths.flatten(params)
    self._check(named)
    count = jnp.zeros((), jnp.int32)
    store = None
    if self.shadow is not None:
      store = treedef.unflatten(
        [
          self._store(to_float32(x)) if self.rounds(x) else optax.MaskedNode()
          for _, x in named
        ]
      )
    if self.words is None:
      return NearestRoundingState(count, store)
    words = jnp.array(self.words, copy=True)  # a donated state keeps it ours
    return StochasticRoundingState(count, words, self.first_key(words), store)

  def update(self, updates, state: LinkState, params=None, **extra):
    """Adds FP32 updates to the shadow and emits the steps to its rounding."""
    return self.step(
      updates, state, params, self.current(state, params), **extra
    )

  def current(self, state: LinkState, params) -> list[tuple[str, jax.Array]]:
    """The shadow as [(path, array)], foreign weights adopted."""
    if params is None:
      raise ValueError(
        'expected params: the link rounds the weights themselves; call '
        'update(updates, state, params)'
      )
    kind = StochasticRoundingState
    if self.words is None:
      kind = NearestRoundingState
    if not isinstance(state, kind):
      raise TypeError(
        f'state: expected {kind.__name__}, got {type(state).__name__}'
      )
    named, _ = paths.flatten(params)
    if self.shadow is not None:
      weights = [(path, p) for path, p in named if self.rounds(p)]
      match(paths.flatten(state.shadow)[0], weights, 'shadow', 'params')
    return [(path, s) for path, s, _ in reconstruct(state, named)]

  def step(self, updates, state: LinkState, params, shadow, *, key=None, **_):
    """As `update`, with the shadow from `current` already at hand."""
    named_params, _ = paths.flatten(params)
    named_updates, treedef = paths.flatten(updates)
    steps = match_updates(named_updates, named_params)
    self._check(named_params)
    last_key = self._next_key(state, key)
    chosen = [path for path, p in named_params if self.rounds(p)]
    keys = {}
    if last_key is not None:
      keys = noise.leaf_keys(last_key, chosen)
    emitted, store = {}, {}
    for (path, p), (_, s) in zip(named_params, shadow, strict=True):
      u = steps[path]
      if not self.rounds(p):
        emitted[path], store[path] = u, optax.MaskedNode()
        continue
      s = rounding.saturate(s + u.astype(jnp.float32), self.target)
      q = round_shadow(s, self.target, keys.get(path))
      emitted[path] = difference(q, p)
      store[path] = self._store(s)
    out = treedef.unflatten([emitted[path] for path, _ in named_updates])
    state = state._replace(count=optax.safe_increment(state.count))
    if last_key is not None:
      state = state._replace(last_key=last_key)
    if self.shadow is not None:
      # Written in the order of the state's own tree, whatever its type.
      state = state._replace(shadow=paths.replace(state.shadow, store))
    return out, state

  def rounds(self, x) -> bool:
    """Whether a parameter leaf is one that this link rounds."""
    return x.dtype == self.target

  def first_key(self, words: jax.Array) -> jax.Array:
    """Noise key of the weights before any update."""
    return noise.fold(
      words, 0 if self.refresh_every == math.inf else _BEFORE_FIRST
    )

  def _next_key(self, state: LinkState, key) -> jax.Array | None:
    if self.words is None:
      return None
    if key is None:
      words = state.key
    elif self.refresh_every != 1:
      raise ValueError(
        'a key for one call needs refresh_every=1, '
        f'got refresh_every={self.refresh_every}'
      )
    else:
      words = noise.key_words(key)
    if self.refresh_every >= 2**31:  # beyond the counter: one epoch
      return noise.fold(words, 0)
    return noise.fold(words, state.count // int(self.refresh_every))

  def _store(self, shadow: jax.Array):
    return residual.split(shadow) if self.shadow == 'residual16' else shadow

  def _check(self, named) -> None:
    floats = [
      (path, x) for path, x in named if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    for path, x in floats:
      if x.dtype != self.target and jnp.finfo(x.dtype).bits <= 16:
        raise TypeError(
          f'parameter {path!r}: expected {self.target.name}, float32 or '
          f'float64, got {x.dtype}'
        )
    if floats and not any(self.rounds(x) for _, x in floats):
      raise ValueError(
        f'no parameter is {self.target.name}, so nothing would be rounded: '
        f'cast the parameters to {self.target.name} first '
        f'(got {sorted({x.dtype.name for _, x in floats})})'
      )


def stochastic_rounding(
  key: jax.Array,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  shadow: str | None = 'float32',
  refresh_every: float = 1,
) -> optax.GradientTransformationExtraArgs:
  """Rounds the weights stochastically: the last link of a chain.

  Keeps FP32 shadow weights in its state, adds the incoming updates to them,
  rounds them to `dtype` and emits FP32 updates with which
  `optax.apply_updates` lands on the rounded weights. Leaves in FP32, FP64,
  integers and bools pass through. Use it in `sr_optax.chain`, which also feeds
  the other links with FP32.

  Args:
    key: a typed key or a raw `uint32[2]` key. The only source of randomness:
      equal keys give equal runs, bit for bit, on any sharding.
    dtype: of the weights, bfloat16 or float16.
    shadow: 'float32' (4 bytes a weight), 'residual16' (2 bytes, exact,
      bfloat16 only), or None (rounds param + update; unbiased but noisier).
    refresh_every: steps that share one draw of noise. 1: fresh noise each
      step; K; or `math.inf`: one threshold per weight for the whole run, so a
      weight changes only when its shadow crosses it.

  Returns:
    A transform whose `update` needs `params`, and takes `key=` to replace the
    key for one call (only with `refresh_every=1`).

  Raises:
    TypeError: at `init`, for a float parameter of 16 bits or less that is not
      `dtype`.
    ValueError: for an unsupported option, and at `init` if the tree has float
      parameters but none in `dtype`.

  Reference: Croci et al., Stochastic rounding: implementation, error analysis
  and applications, https://doi.org/10.1098/rsos.211631

  Example:
    >>> import jax, jax.numpy as jnp, optax, sr_optax
    >>> params = {'w': jnp.ones((3, 5), jnp.bfloat16)}
    >>> tx = sr_optax.chain(
    ...   optax.adamw(1e-3), sr_optax.stochastic_rounding(jax.random.key(0)))
    >>> state = tx.init(params)
    >>> grads = {'w': jnp.ones((3, 5), jnp.bfloat16)}
    >>> updates, state = tx.update(grads, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> params['w'].dtype
    dtype(bfloat16)
  """
  target = rounding.check_target(dtype)
  _check_shadow(shadow, ('float32', 'residual16', None))
  if shadow == 'residual16' and target != jnp.bfloat16:
    raise ValueError(
      "shadow='residual16' needs dtype=bfloat16 (the upper half of float32), "
      f'got {target.name}'
    )
  if refresh_every != math.inf:
    try:
      steps = operator.index(refresh_every)
    except TypeError:
      steps = 0
    if steps < 1 or isinstance(refresh_every, bool):
      raise ValueError(
        'refresh_every: expected a whole number of steps >= 1 or math.inf, '
        f'got {refresh_every!r}'
      )
    refresh_every = steps
  if shadow is None and refresh_every != 1:
    raise ValueError(
      'shadow=None needs refresh_every=1: the same noise at every step of the '
      f'weights themselves drifts, got refresh_every={refresh_every}'
    )
  words = noise.key_words(key)
  return transform(Link(target, shadow, words, refresh_every))


def nearest_rounding(
  *, dtype: DTypeLike = jnp.bfloat16, shadow: str | None = 'float32'
) -> optax.GradientTransformationExtraArgs:
  """The same link with round-to-nearest-even: today's practice, the baseline.

  Args:
    dtype: of the weights, bfloat16 or float16.
    shadow: 'float32', or None (pure low-precision weights, which lose small
      updates for ever). Finite values saturate, as in `stochastic_rounding`.

  Raises:
    ValueError: for an unsupported option, 'residual16' among them: ties to
      even lose one bit.
    TypeError, ValueError: at `init`, as `stochastic_rounding`.
  """
  target = rounding.check_target(dtype)
  _check_shadow(shadow, ('float32', None))
  return transform(Link(target, shadow))


def transform(part) -> optax.GradientTransformationExtraArgs:
  """An optax transform out of an object with `init` and `update`."""
  return optax.GradientTransformationExtraArgs(part.init, part.update)


def reconstruct(
  state: LinkState, named: list[tuple[str, jax.Array]]
) -> list[tuple[str, jax.Array, jax.Array | None]]:
  """Returns [(path, FP32 shadow, foreign)] for parameters [(path, array)].

  `foreign` marks weights that are no neighbour of their shadow: somebody
  replaced them, and the shadow returned is the weight itself. It is None where
  that cannot be seen. Weights without a stored shadow are widened, all other
  leaves returned as they are.
  """
  stored = dict(paths.flatten(state.shadow)[0])
  residuals = [path for path, lo in stored.items() if lo.dtype == jnp.uint16]
  keys = {}
  if residuals:
    keys = noise.leaf_keys(state.last_key, residuals)
  result = []
  for path, p in named:
    s = stored.get(path)
    if s is None:
      small = p.dtype in (jnp.bfloat16, jnp.float16)
      result.append((path, to_float32(p) if small else p, None))
      continue
    if s.shape != p.shape:
      raise ValueError(
        f'parameter {path!r}: expected the shape of its shadow, {s.shape}, '
        f'got {p.shape}'
      )
    if path in keys:
      u = rounding.draw(keys[path], p.shape, p.dtype)
      result.append((path, residual.join(p, s, u), None))
    else:
      foreign = ~rounding.is_neighbour(p, s)
      result.append((path, jnp.where(foreign, to_float32(p), s), foreign))
  return result


def round_shadow(
  shadow: jax.Array, target: jnp.dtype, leaf_key: jax.Array | None
) -> jax.Array:
  """Rounds one shadow leaf: with the noise of its key, or to nearest."""
  if leaf_key is None:
    u = rounding.nearest_noise(shadow, target)
  else:
    u = rounding.draw(leaf_key, shadow.shape, target)
  return rounding.apply_noise(shadow, u, target)


def difference(q: jax.Array, p: jax.Array) -> jax.Array:
  """The FP32 update u with which p + u, rounded to the grid, is q.

  -0.0 where q and p are the same bits, so that -0.0 stays -0.0. A difference
  that the backend flushes to zero is replaced by the smallest subnormal, so
  that an update has zero magnitude bits exactly where nothing changes.
  """
  same = lax.bitcast_convert_type(q, jnp.uint16) == (
    lax.bitcast_convert_type(p, jnp.uint16)
  )
  u = to_float32(q) - to_float32(p)
  tiny = lax.bitcast_convert_type(jnp.uint32(1), jnp.float32)
  return jnp.where(same, jnp.float32(-0.0), jnp.where(u == 0, tiny, u))


def match(named, reference, what: str, other: str) -> dict[str, jax.Array]:
  """Matches two flattened trees by path; ValueError if their paths differ."""
  found = dict(named)
  missing = [path for path, _ in reference if path not in found]
  extra = sorted(set(found) - {path for path, _ in reference})
  if missing or extra:
    raise ValueError(
      f'{what} and {other} differ in structure: {what} lack {missing[:5]}, '
      f'{other} lack {extra[:5]}'
    )
  return found


def match_updates(named_updates, named_params) -> dict[str, jax.Array]:
  """`match` of updates with parameters, their shapes too."""
  steps = match(named_updates, named_params, 'updates', 'params')
  for path, p in named_params:
    if steps[path].shape != p.shape:
      raise ValueError(
        f'update of {path!r}: expected shape {p.shape}, got {steps[path].shape}'
      )
  return steps


def to_float32(x: jax.Array) -> jax.Array:
  """Widens BF16 or FP16 weights, exactly, subnormals included.

  By integers for BF16: backends that flush subnormals would change them.
  """
  if x.dtype == jnp.bfloat16:
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)
  return x.astype(jnp.float32)


def _check_shadow(shadow, allowed: tuple) -> None:
  if shadow not in allowed:
    raise ValueError(f'shadow: expected one of {allowed}, got {shadow!r}')
