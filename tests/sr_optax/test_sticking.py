"""What it is for: weights that move when their updates are small."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sr_optax

BF16 = jnp.bfloat16
INF = float('inf')


def run(tx, params, grad, steps):
  """`steps` steps with one gradient, in one scan."""

  @jax.jit
  def go(params):
    def body(carry, _):
      params, state = carry
      updates, state = tx.update(grad, state, params)
      return (optax.apply_updates(params, updates), state), None

    carry, _ = jax.lax.scan(body, (params, tx.init(params)), None, length=steps)
    return carry

  params, state = go(params)
  return np.asarray(params).astype(np.float64), state


def stochastic(seed=0, **kwargs):
  return sr_optax.stochastic_rounding(jax.random.key(seed), **kwargs)


def test_nearest_rounding_without_a_shadow_never_moves_in_2000_small_steps():
  tx = sr_optax.chain(optax.sgd(1.0), sr_optax.nearest_rounding(shadow=None))
  params, _ = run(
    tx, jnp.ones((101,), BF16), jnp.full((101,), -(2.0**-11)), 2000
  )
  np.testing.assert_array_equal(params, 1.0)


def test_stochastic_rounding_without_a_shadow_lands_in_the_mean():
  # 1 + 2000 / 2048. A step of the grid is 2^-7 (2^-6 beyond 2), a move has
  # probability 1/16 (1/32): variance per step at most 2^-12 / 32.
  n, steps = 10_007, 2000
  tx = sr_optax.chain(optax.sgd(1.0), stochastic(shadow=None))
  params, _ = run(tx, jnp.ones((n,), BF16), jnp.full((n,), -(2.0**-11)), steps)
  sigma = (steps * 2.0**-12 / 32 / n) ** 0.5
  assert abs(params.mean() - (1 + steps / 2048)) < 5 * sigma


@pytest.mark.parametrize('shadow', ['float32', 'residual16'])
@pytest.mark.parametrize('refresh', [1, 7, INF])
def test_stochastic_rounding_of_a_shadow_lands_in_the_mean(shadow, refresh):
  # 1,999 steps end 15/16 of the way between two grid values: Bernoulli.
  n, steps = 10_007, 1999
  tx = sr_optax.chain(
    optax.sgd(1.0), stochastic(1, shadow=shadow, refresh_every=refresh)
  )
  params, state = run(
    tx, jnp.ones((n,), BF16), jnp.full((n,), -(2.0**-11)), steps
  )
  sigma = 2.0**-7 * (15 / 16 / 16 / n) ** 0.5
  assert abs(params.mean() - (1 + steps / 2048)) < 5 * sigma
  shadow = sr_optax.shadow_params(state, jnp.asarray(params, BF16))
  np.testing.assert_array_equal(shadow, np.full(n, 1 + steps / 2048))


@pytest.mark.parametrize('shadow', ['float32', 'residual16', None])
def test_weight_decay_of_1e_5_a_step_decays_the_mean(shadow):
  # Zero gradients, lr * wd = 1e-5, k steps: w (1 - 1e-5)^k. Without a shadow a
  # step of the grid below 1 is 2^-8, a move has probability ~ 1e-5 * 2^8, so
  # the variance is at most k 2^-8 1e-5; with one, a single draw. FP32 rounds
  # each step by at most 2^-25.
  n, k = 10_007, 1000
  tx = sr_optax.chain(
    optax.adamw(1e-3, weight_decay=1e-2), stochastic(2, shadow=shadow)
  )
  params, _ = run(tx, jnp.ones((n,), BF16), jnp.zeros((n,), BF16), k)
  variance = k * 2.0**-8 * 1e-5 if shadow is None else 2.0**-18
  error = abs(params.mean() - (1 - 1e-5) ** k)
  assert error < 5 * (variance / n) ** 0.5 + k * 2.0**-25


def test_weight_decay_is_lost_by_nearest_rounding_without_a_shadow():
  tx = sr_optax.chain(
    optax.adamw(1e-3, weight_decay=1e-2), sr_optax.nearest_rounding(shadow=None)
  )
  params, _ = run(tx, jnp.ones((101,), BF16), jnp.zeros((101,), BF16), 1000)
  np.testing.assert_array_equal(params, 1.0)


@pytest.mark.parametrize('shadow', ['float32', 'residual16', None])
def test_a_weight_of_exactly_one_moves_at_small_learning_rates(shadow):
  # Adam with a constant gradient steps by lr: after 100 steps of 1e-4 the
  # weight is 0.99, 2.56 steps of the grid below 1.0.
  n = 1009
  tx = sr_optax.chain(optax.adam(1e-4), stochastic(3, shadow=shadow))
  params, _ = run(tx, jnp.ones((n,), BF16), jnp.ones((n,), BF16), 100)
  assert (params < 1).mean() > 0.9
  # Without a shadow: 100 moves of 2^-8 with probability 0.0256.
  sigma = (100 * 2.0**-16 * 0.0256 / n) ** 0.5
  assert abs(params.mean() - 0.99) < 5 * sigma


@pytest.mark.parametrize('refresh', [1, INF])
@pytest.mark.parametrize('dtype', [BF16, jnp.float16])
def test_visible_displacement_follows_the_shadow_with_slope_one(dtype, refresh):
  # Weights N(0, 0.02) on the grid, 100 Adam-sized steps of 1e-6 in a random
  # direction each. Least-squares slope through 0 of visible on shadow
  # displacement; the rounding error of a weight is independent of the others
  # with variance at most step^2 / 4.
  n = 50_021
  rng = np.random.default_rng(4)
  start = jnp.asarray(rng.standard_normal(n) * 0.02, dtype)
  grad = jnp.asarray(rng.choice([-1.0, 1.0], n), jnp.float32)
  tx = sr_optax.chain(
    optax.sgd(1e-6), stochastic(5, dtype=dtype, refresh_every=refresh)
  )
  params, state = run(tx, start, grad, 100)
  x = np.asarray(state[-1].shadow).astype(float) - np.asarray(start, float)
  y = params - np.asarray(start, float)
  size = grid_step(state[-1].shadow, dtype)
  slope = (x * y).sum() / (x * x).sum()
  sigma = (x * x * size * size / 4).sum() ** 0.5 / (x * x).sum()
  assert 5 * sigma < 0.35  # the test says something
  assert abs(slope - 1) < 5 * sigma


def test_the_nearest_copy_lags_behind_its_shadow():
  n = 50_021
  rng = np.random.default_rng(4)
  start = jnp.asarray(rng.standard_normal(n) * 0.02, BF16)
  grad = jnp.asarray(rng.choice([-1.0, 1.0], n), jnp.float32)
  tx = sr_optax.chain(optax.sgd(1e-6), sr_optax.nearest_rounding())
  params, state = run(tx, start, grad, 10)
  x = np.asarray(state[-1].shadow).astype(float) - np.asarray(start, float)
  y = params - np.asarray(start, float)
  assert (x * y).sum() / (x * x).sum() < 0.5


def grid_step(x, dtype):
  """Distance of the two neighbours of each FP32 value in `dtype`."""
  exponent = np.frexp(np.abs(np.asarray(x)).astype(float))[1] - 1
  if dtype == BF16:
    return 2.0 ** (exponent - 7)
  return 2.0 ** np.maximum(exponent - 10, -24)


@pytest.mark.parametrize('shadow', ['float32', 'residual16'])
def test_sticky_weights_change_no_more_often_than_their_shadow_crosses(shadow):
  # A weight changes where its shadow crosses its threshold: probability
  # |displacement| / grid step, or 1 near zero where the steps are smaller. Per
  # step at most 1.2 times that, and over all at least 0.8 times (it is not
  # stuck); 5 sigma of the count of changes are below 10 % and 5 %.
  n, steps = 200_003, 40
  rng = np.random.default_rng(6)
  start = jnp.asarray(rng.standard_normal(n) * 0.02, BF16)
  tx = sr_optax.chain(
    optax.sgd(1e-6), stochastic(7, shadow=shadow, refresh_every=INF)
  )

  @jax.jit
  def step(params, state, grad):
    updates, state = tx.update(grad, state, params)
    new = optax.apply_updates(params, updates)
    changed = jax.lax.bitcast_convert_type(new, jnp.uint16) != (
      jax.lax.bitcast_convert_type(params, jnp.uint16)
    )
    return new, state, changed.sum(), sr_optax.shadow_params(state, new)

  params, state = start, tx.init(start)
  old = np.asarray(start, np.float32)
  count, crossing = 0, 0.0
  for _ in range(steps):
    grad = jnp.asarray(rng.standard_normal(n), jnp.float32)
    params, state, changed, shadow_now = step(params, state, grad)
    shadow_now = np.asarray(shadow_now)
    crossings = np.abs(shadow_now - old) / grid_step(old, BF16)
    expected = np.minimum(crossings, 1).sum()
    assert 5 * expected**0.5 < 0.1 * expected
    assert changed <= 1.2 * expected
    count, crossing, old = count + int(changed), crossing + expected, shadow_now
  assert 5 * crossing**0.5 < 0.05 * crossing
  assert 0.8 * crossing < count < 1.2 * crossing


def test_fresh_noise_redraws_and_sticky_noise_does_not():
  n = 50_021
  rng = np.random.default_rng(8)
  start = jnp.asarray(rng.standard_normal(n) * 0.02, BF16)
  grad = jnp.asarray(rng.standard_normal(n), jnp.float32)
  share = {}
  for refresh in (1, INF):
    tx = sr_optax.chain(optax.sgd(1e-6), stochastic(9, refresh_every=refresh))
    params, state = run(tx, start, grad, 100)
    visible = jnp.asarray(params, BF16)
    updates, _ = jax.jit(tx.update)(grad, state, visible)
    new = optax.apply_updates(visible, updates)
    share[refresh] = (np.asarray(new).astype(float) != params).mean()
  assert share[1] > 0.2 and share[INF] < 0.04


def test_a_small_update_moves_down_to_one_part_in_65536_of_a_step():
  # With fewer random bits such an update would never be seen.
  n = 2**20 + 7
  tx = sr_optax.chain(optax.sgd(1.0), stochastic(10))
  params, _ = run(tx, jnp.ones((n,), BF16), jnp.full((n,), -(2.0**-23)), 1)
  moved = (params > 1).sum()
  mean = n / 2**16  # 16: Poisson, 5 sigma down would be 0, so at least one
  assert 1 <= moved < mean + 5 * mean**0.5
