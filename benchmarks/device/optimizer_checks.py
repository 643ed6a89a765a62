"""What must be true of the optimizer's links on any device."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import sr_optax
from benchmarks.device.reference import (
  BF16,
  FP16,
  INF,
  MASK,
  NUMPY,
  all_halves,
  bits16,
  bits32,
  equal,
  expected_noise,
  expected_rounding,
  frozen,
  named,
  uniform,
  uniform_tree,
  widened,
)
from benchmarks.device.results import Failed, Numbers
from benchmarks.device.rounding_checks import needs

_SEED = 9  # of the trajectories
# FP32 words of 1e-6 to 1e-3, of 1e-5 one ulp above it, as they were frozen.
# Not computed: NumPy's powers differ in the last bit from host to host.
_SIZES = np.tile(
  np.uint32([0x358637BD, 0x3727C5AD, 0x38D1B717, 0x3A83126F]), 3
).view(np.float32)


def checks() -> dict[str, Callable[[], Numbers]]:
  """The checks by name."""

  def trajectory(*args, **kwargs):
    return functools.partial(check_trajectory, *args, **kwargs)

  return {
    f'apply_updates_{BF16}': functools.partial(check_apply_updates, BF16),
    f'apply_updates_{FP16}': functools.partial(check_apply_updates, FP16),
    'nearest_casts_not_elided': check_casts,
    'trajectory_nearest': trajectory(refresh_every=None),
    'trajectory_fresh': trajectory(),
    'trajectory_sticky': trajectory(refresh_every=math.inf),
    'trajectory_residual16': trajectory(shadow='residual16'),
    'trajectory_no_shadow': trajectory(shadow=None),
    'trajectory_float16': trajectory(target=FP16),
    'residual16_roundtrip': check_residual16,
  }


def check_trajectory(
  refresh_every: float | None = 1,
  shadow: str | None = 'float32',
  target: jnp.dtype = BF16,
) -> Numbers:
  """Weights and shadow of a link over steps, by given FP32 updates, in scan.

  Args:
    refresh_every: of the link's noise; None for rounding to nearest.
    shadow: of the link.
    target: dtype of the weights.
  """
  needs(target)
  if refresh_every is None:
    tx = sr_optax.nearest_rounding(dtype=target, shadow=shadow)
  else:
    tx = sr_optax.stochastic_rounding(
      jax.random.key(_SEED),
      dtype=target,
      shadow=shadow,
      refresh_every=refresh_every,
    )
  start, updates = _start_and_updates(target)

  def step(carry, u):
    p, state = carry
    u, state = tx.update(u, state, p)
    exact = sr_optax.apply_updates(p, u, state)
    p = optax.apply_updates(p, u)
    seen = {
      'landed': p,
      'exact': exact,
      'widened': jax.tree.map(lambda p: p.astype(jnp.float32), p),
      'shadow': sr_optax.shadow_params(state, p),
    }
    return (p, state), seen

  run = jax.jit(lambda p, u: lax.scan(step, (p, tx.init(p)), u)[1])
  got = {kind: named(tree) for kind, tree in run(start, updates).items()}
  compared, expected = 0, []
  for i, (path, p) in enumerate(named(start)):
    codes, shadows = _expected_trajectory(
      path, p, named(updates)[i][1], refresh_every, shadow, target
    )
    want = {
      'landed': codes,
      'exact': codes,
      'widened': widened(codes, target),
      'shadow': shadows,
    }
    for kind, bits in want.items():
      seen = np.asarray(got[kind][i][1]).view(bits.dtype)
      compared += equal(f'{kind} {path}', seen, bits)
    expected += [codes, shadows]
  kind = 'nearest' if refresh_every is None else refresh_every
  suffix = '_none' if shadow is None else ''
  frozen(f'trajectory_{target}_{kind}{suffix}', *expected)
  return {'compared': compared}


def _start_and_updates(target: jnp.dtype) -> tuple[dict, dict]:
  """Weights below 0.04 on the grid; updates from 1e-6 to 1e-3, by step."""

  def updates(p):
    scale = _SIZES.reshape(-1, *[1] * p.ndim)
    return uniform(11, (len(_SIZES), *p.shape)) * scale

  start = jax.tree.map(
    lambda x: (x * np.float32(0.04)).astype(NUMPY[target]),
    uniform_tree(10, (53, 41)),
  )
  return start, jax.tree.map(updates, start)


def _expected_trajectory(
  path: str,
  p: np.ndarray,
  updates: np.ndarray,
  refresh_every: float | None,
  shadow: str | None,
  target: jnp.dtype,
) -> tuple[np.ndarray, np.ndarray]:
  """Codes of a weight and words of its shadow, after every update."""
  s = p.astype(np.float32)
  codes, shadows = [], []
  for t, u in enumerate(updates):
    s = s + u
    draws = None
    if refresh_every is not None:
      epoch = 0 if refresh_every == math.inf else t // refresh_every
      draws = expected_noise(_SEED, epoch, path, s.size).reshape(s.shape)
    codes.append(expected_rounding(bits32(s), draws, target))
    if shadow is None:
      s = widened(codes[-1], target).view(np.float32)
    shadows.append(bits32(s))
  return np.stack(codes), np.stack(shadows)


def check_casts() -> Numbers:
  """The visible weight as FP32 has 16 zero bits; the shadow keeps its own.

  XLA may leave out a cast to BF16 that is followed by one back to FP32, and
  does so with a plain `astype` on some devices: `plain_cast_elided`.
  """
  start, updates = _start_and_updates(BF16)
  tx = sr_optax.nearest_rounding()

  def step(carry, u):
    p, state = carry
    u, state = tx.update(u, state, p)
    p = optax.apply_updates(p, u)
    # The same shadow rounded again, visible only to this loop.
    again, _ = sr_optax.init_from_shadow(tx, state.shadow)
    seen = {
      'visible': p,
      'rounded': again,
      'plain': jax.tree.map(lambda s: s.astype(BF16), state.shadow),
      'shadow': state.shadow,
    }
    return (p, state), jax.tree.map(lambda x: x.astype(jnp.float32), seen)

  run = jax.jit(lambda p, u: lax.scan(step, (p, tx.init(p)), u)[1])
  share = {}
  for name, tree in run(start, updates).items():
    words = np.concatenate([bits32(x).ravel() for x in jax.tree.leaves(tree)])
    share[name] = float(np.mean(words & 0xFFFF != 0))
  off = {f'{k}_off_grid': v for k, v in share.items() if k != 'plain'}
  elided = {'plain_cast_elided': share['plain'] > 0}
  if share['visible'] or share['rounded'] or share['shadow'] < 0.9:
    raise Failed(**off, **elided)
  return off | elided


def check_residual16() -> Numbers:
  """Every upper half: the FP32 shadow out of weight, lower half and noise."""
  word = all_halves()
  word = word[(word & 0x7FFFFFFF) <= 0x7F7F0000]  # others saturate
  tx = sr_optax.stochastic_rounding(jax.random.key(12), shadow='residual16')
  start = jax.jit(lambda x: sr_optax.init_from_shadow(tx, x))
  params, state = start(word.view(np.float32))
  # The noise before the first step has the last epoch.
  u = expected_noise(12, MASK, '', word.size)
  want = expected_rounding(word, u, BF16)
  compared = equal('weights', bits16(params), want)
  # A function of its own: one that jit has seen would not be traced again.
  shadow = jax.jit(lambda s, p: sr_optax.shadow_params(s, p))(state, params)
  compared += equal('shadow', bits32(shadow), word)
  frozen('residual16_roundtrip', want)
  return {'compared': compared}


def check_apply_updates(target: jnp.dtype) -> Numbers:
  """Weights land on the rounding of the shadow, however far that is.

  `sr_optax.apply_updates` always, `optax.apply_updates` but for what no FP32
  sum can express (tests/sr_optax/test_landing.py).
  """
  needs(target)
  size, inf = 100_003, INF[target]
  draw = [
    expected_noise(6, i, 'pairs', size).astype(np.int64) for i in range(5)
  ]
  sign = (draw[0] & 0x8000, draw[0] >> 1 & 0x8000)
  p = draw[1] % inf
  near = np.clip(p + draw[2] % 4000 - 2000, 0, inf - 1)
  goal = np.where(draw[3] & 1, near, draw[2] % inf) | sign[1]
  p = (p | sign[0]).astype(np.uint16)
  wide = widened(p, target).view(np.float32)
  goal = widened(goal.astype(np.uint16), target)
  goal = (goal + (draw[4] >> 20).astype(np.uint32)).view(np.float32)
  with np.errstate(over='ignore'):
    u = goal - wide
  tx = sr_optax.stochastic_rounding(jax.random.key(8), dtype=target)

  @jax.jit
  def step(p, u):
    updates, state = tx.update(u, tx.init(p), p)
    landed = optax.apply_updates(p, updates)
    exact = sr_optax.apply_updates(p, updates, state)
    return landed, exact, state.shadow

  landed, exact, shadow = map(np.asarray, step(p.view(NUMPY[target]), u))
  # Of the device's own sum, which may flush subnormals.
  truth = expected_rounding(
    bits32(shadow), expected_noise(8, 0, '', size), target
  )
  compared = equal('sr_optax.apply_updates', bits16(exact), truth)
  q = widened(truth, target).view(np.float32).astype(np.float64)
  p = wide.astype(np.float64)
  limit = 2.0**16 if target == BF16 else 2.0**13
  excused = (
    (truth & 0x7FFF == 0)
    | (np.abs(q) < 2.0**-118)
    | (np.abs(p) > limit * np.abs(q))
    | (np.abs(q - p) > np.finfo(np.float32).max)
  )
  equal('optax.apply_updates', bits16(landed)[~excused], truth[~excused])
  return {'compared': compared, 'by_optax': int((~excused).sum())}
