"""The last link: identity, epochs of noise, adoption, what passes through."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sr_optax

BF16, FP16 = jnp.bfloat16, jnp.float16
INF = float('inf')


def code(q):
  return np.asarray(q).view(np.uint16)


def fold(key, epoch):
  return jax.random.key_data(jax.random.fold_in(key, epoch))


def weights(seed, shape=(13, 17), dtype=BF16):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape) * 0.02, dtype)


def step_of(tx, exact=False):
  @jax.jit
  def step(params, state, u):
    updates, state = tx.update(u, state, params)
    if exact:
      return sr_optax.apply_updates(params, updates, state), state
    return optax.apply_updates(params, updates), state

  return step


MODES = [
  (BF16, 'float32', 1),
  (BF16, 'float32', 3),
  (BF16, 'float32', INF),
  (BF16, 'residual16', 1),
  (BF16, 'residual16', 3),
  (BF16, 'residual16', INF),
  (FP16, 'float32', 1),
  (FP16, 'float32', INF),
]


@pytest.mark.parametrize('dtype, shadow, refresh', MODES)
def test_weights_are_the_rounding_of_the_shadow_after_every_step(
  dtype, shadow, refresh
):
  tx = sr_optax.stochastic_rounding(
    jax.random.key(0), dtype=dtype, shadow=shadow, refresh_every=refresh
  )
  params = {'a': weights(0, dtype=dtype), 'b': [weights(1, (7,), dtype)]}
  state, step = tx.init(params), step_of(tx)

  @jax.jit
  def identity(params, state):
    return sr_optax.stochastic_round_tree(
      state.last_key, sr_optax.shadow_params(state, params), dtype
    )

  rng = np.random.default_rng(2)
  expected = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
  for i in range(7):
    again = identity(params, state)
    jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(code(x), code(y)),
      params,
      again,
    )
    u = jax.tree.map(
      lambda x: (rng.standard_normal(x.shape) * 1e-4).astype(np.float32),
      params,
    )
    params, state = step(params, state, u)
    # The shadow is the plain FP32 sum, never touched by the rounding.
    expected = jax.tree.map(np.add, expected, u)
    jax.tree.map(
      np.testing.assert_array_equal,
      sr_optax.shadow_params(state, params),
      expected,
    )
    assert int(state.count) == i + 1


@pytest.mark.parametrize('refresh', [1, 2, 3, 2**31, 2**40, INF])
def test_the_noise_is_keyed_by_the_step_divided_by_refresh_every(refresh):
  key = jax.random.key(4)
  tx = sr_optax.stochastic_rounding(key, refresh_every=refresh)
  params = weights(3)
  state, step = tx.init(params), step_of(tx)
  np.testing.assert_array_equal(state.key, jax.random.key_data(key))
  first = 0 if refresh == INF else 2**32 - 1  # a draw that no step uses
  np.testing.assert_array_equal(state.last_key, fold(key, np.uint32(first)))
  for i in range(7):
    params, state = step(params, state, jnp.zeros((13, 17)))
    epoch = 0 if refresh == INF else i // refresh
    np.testing.assert_array_equal(state.last_key, fold(key, epoch))


def test_two_steps_of_the_same_weights_use_different_noise():
  tx = sr_optax.stochastic_rounding(jax.random.key(5))
  params = jnp.full((1009,), 1.0, BF16)
  state, step = tx.init(params), step_of(tx)
  params, state = step(params, state, jnp.full((1009,), 2.0**-8))
  again, _ = step(params, state, jnp.zeros((1009,)))
  assert abs((code(params) != code(again)).mean() - 0.5) < 5 * 0.5 / 1009**0.5


def test_sticky_weights_do_not_move_without_updates():
  tx = sr_optax.stochastic_rounding(jax.random.key(6), refresh_every=INF)
  params = jnp.full((1009,), 1.0, BF16)
  state, step = tx.init(params), step_of(tx)
  params, state = step(params, state, jnp.full((1009,), 2.0**-8))
  for _ in range(3):
    again, state = step(params, state, jnp.zeros((1009,)))
    np.testing.assert_array_equal(code(params), code(again))


def test_a_key_for_one_call_replaces_the_key_of_the_state():
  tx = sr_optax.stochastic_rounding(jax.random.key(7))
  params, other = weights(4), jax.random.key(8)
  state = tx.init(params)
  u = jnp.full((13, 17), 1e-5)
  updates, after = jax.jit(tx.update)(u, state, params, key=other)
  np.testing.assert_array_equal(after.last_key, fold(other, 0))
  np.testing.assert_array_equal(after.key, state.key)
  want = sr_optax.stochastic_round_tree(after.last_key, after.shadow)
  np.testing.assert_array_equal(
    code(optax.apply_updates(params, updates)), code(want)
  )
  chained = sr_optax.chain(
    optax.sgd(1.0), sr_optax.stochastic_rounding(jax.random.key(7))
  )
  _, after = jax.jit(chained.update)(
    -u, chained.init(params), params, key=other
  )
  np.testing.assert_array_equal(after[-1].last_key, fold(other, 0))


def test_the_key_of_a_restored_state_wins_over_the_one_given():
  params, u = weights(5), jnp.full((13, 17), 1e-5)
  a = sr_optax.stochastic_rounding(jax.random.key(9))
  b = sr_optax.stochastic_rounding(jax.random.key(10))
  state = a.init(params)
  want = step_of(a)(params, state, u)
  got = step_of(b)(params, state, u)
  jax.tree.map(np.testing.assert_array_equal, want, got)


def test_without_a_shadow_the_weight_plus_update_is_rounded():
  tx = sr_optax.stochastic_rounding(jax.random.key(11), shadow=None)
  params = weights(6)
  state = tx.init(params)
  assert state.shadow is None
  u = jnp.asarray(np.random.default_rng(7).standard_normal((13, 17)), 'f4')
  new, state = step_of(tx)(params, state, u)
  total = np.asarray(params, np.float32) + np.asarray(u)
  want = sr_optax.stochastic_round_tree(state.last_key, total)
  np.testing.assert_array_equal(code(new), code(want))


def test_other_leaves_take_the_inner_update_as_it_is():
  params = {
    'w': weights(7),
    'norm': jnp.ones((5,), jnp.float32),
    'step': jnp.array(3),
    'mask': jnp.array([True, False]),
  }
  tx = sr_optax.stochastic_rounding(jax.random.key(12))
  state = tx.init(params)
  updates = {
    'w': jnp.full((13, 17), 1e-5),
    'norm': jnp.full((5,), 1e-7, jnp.float32),
    'step': jnp.array(2),
    'mask': jnp.array([False, True]),
  }
  new, state = jax.jit(tx.update)(updates, state, params)
  for name in ('norm', 'step', 'mask'):
    np.testing.assert_array_equal(new[name], updates[name])
    assert new[name].dtype == updates[name].dtype
  shadow = sr_optax.shadow_params(state, params)
  assert shadow['norm'] is params['norm'] and shadow['step'] is params['step']
  ours = sr_optax.apply_updates(params, new, state)
  np.testing.assert_array_equal(ours['norm'], 1 + np.full(5, 1e-7, np.float32))


def test_float64_leaves_keep_their_precision():
  with jax.enable_x64(True):
    params = {'w': weights(8), 'x': jnp.ones((3,), jnp.float64)}
    tx = sr_optax.chain(
      optax.sgd(1.0), sr_optax.stochastic_rounding(jax.random.key(13))
    )
    state = tx.init(params)
    grads = {'w': jnp.ones((13, 17), BF16), 'x': jnp.full((3,), 1e-12)}
    updates, state = jax.jit(tx.update)(grads, state, params)
    assert updates['x'].dtype == jnp.float64
    assert updates['w'].dtype == jnp.float32
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(new['x'], np.full(3, 1 - 1e-12))


@pytest.mark.parametrize('make', ['stochastic', 'nearest'])
@pytest.mark.parametrize('dtype', [BF16, FP16])
def test_a_shadow_that_grows_beyond_the_range_saturates(make, dtype):
  tx = (
    sr_optax.nearest_rounding(dtype=dtype)
    if make == 'nearest'
    else sr_optax.stochastic_rounding(jax.random.key(14), dtype=dtype)
  )
  largest = 0x7F7F if dtype == BF16 else 0x7BFF
  params = jnp.asarray(np.array([largest, 0x8000 | largest], 'u2').view(dtype))
  state, step = tx.init(params), step_of(tx)
  big = float(params[0]) * 2**-9
  for sign in (1, 1, 1):
    u = jnp.array([sign * big, -sign * big], jnp.float32)
    params, state = step(params, state, u)
    np.testing.assert_array_equal(code(params), [largest, 0x8000 | largest])
  # It has not wandered off: one step back is visible at once.
  params, state = step(params, state, -2 * u)
  assert (code(params) & 0x7FFF < largest).all()


@pytest.mark.parametrize('make', ['stochastic', 'nearest', 'sticky'])
def test_far_away_replacements_are_adopted(make):
  tx = {
    'stochastic': sr_optax.stochastic_rounding(jax.random.key(15)),
    'sticky': sr_optax.stochastic_rounding(
      jax.random.key(15), refresh_every=INF
    ),
    'nearest': sr_optax.nearest_rounding(),
  }[make]
  params = weights(9, (101,))
  state, step = tx.init(params), step_of(tx)
  params, state = step(params, state, jnp.full((101,), 1e-5))
  before = np.asarray(state.shadow)
  new = params.at[::3].set(BF16(0.75))
  shadow = sr_optax.shadow_params(state, new)
  np.testing.assert_array_equal(shadow[::3], np.float32(0.75))
  np.testing.assert_array_equal(shadow[1::3], before[1::3])
  _, state = step(new, state, jnp.full((101,), 2.0**-12))
  want = np.where(np.arange(101) % 3 == 0, np.float32(0.75), before)
  np.testing.assert_array_equal(state.shadow, want + np.float32(2**-12))


@pytest.mark.parametrize('shadow', ['float32', 'residual16', None])
def test_special_values_set_from_outside_stay_what_they_are(shadow):
  # +-0, +-Inf, NaN and +- the smallest subnormal in every position.
  tx = sr_optax.stochastic_rounding(jax.random.key(16), shadow=shadow)
  base = weights(10, (7, 211))
  state, step = tx.init(base), step_of(tx, exact=True)
  optax_step = step_of(tx)
  params, state = optax_step(base, state, jnp.full((7, 211), 1e-5))
  special = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 1, 0x8001], np.uint16)
  for rotation in range(7):
    rows = np.roll(special, rotation)
    new = jnp.asarray(np.tile(rows[:, None], (1, 211)).view(BF16))
    shadow_now = np.asarray(jax.jit(sr_optax.shadow_params)(state, new))
    nan = rows == 0x7FC1
    inf = np.isin(rows, [0x7F80, 0xFF80])
    assert np.isnan(shadow_now[nan]).all()
    assert not np.isnan(shadow_now[~nan]).any()
    np.testing.assert_array_equal(shadow_now[inf], np.asarray(new, 'f4')[inf])
    zero = jnp.zeros((7, 211), jnp.float32)
    for one in (step, optax_step):
      after, _ = one(new, state, zero)
      np.testing.assert_array_equal(code(after)[inf], code(new)[inf])
      assert ((code(after)[nan] & 0x7FFF) > 0x7F80).all()
      assert (code(after)[~nan & ~inf] & 0x7FFF < 0x7F80).all()


def test_an_unchanged_weight_gets_an_update_of_zero():
  tx = sr_optax.stochastic_rounding(jax.random.key(17), refresh_every=INF)
  params = weights(11, (1009,))
  state = tx.init(params)
  updates, state = jax.jit(tx.update)(jnp.full((1009,), 1e-6), state, params)
  new = optax.apply_updates(params, updates)
  same = code(new) == code(params)
  np.testing.assert_array_equal(np.asarray(updates) == 0, same)
  assert 0 < same.sum() < 1009


def test_a_leaf_that_is_masked_away_costs_nothing():
  params = {'w': weights(12), 'frozen': weights(13)}
  tx = sr_optax.stochastic_rounding(jax.random.key(18))
  masked = optax.masked(tx, {'w': True, 'frozen': False})
  state = masked.init(params)
  assert len(jax.tree.leaves(state.inner_state.shadow)) == 1


def test_empty_trees_and_leaves_of_size_zero_work():
  for shadow in ('float32', 'residual16', None):
    tx = sr_optax.stochastic_rounding(jax.random.key(19), shadow=shadow)
    for params in ({}, {'w': jnp.zeros((0, 5), BF16)}):
      state = tx.init(params)
      u = jax.tree.map(lambda x: x.astype(jnp.float32), params)
      new, state = step_of(tx)(params, state, u)
      assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, params)
      assert int(state.count) == 1
      sr_optax.shadow_params(state, params)
      sr_optax.resync(state, params)
