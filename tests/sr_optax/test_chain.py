"""`chain`: every transform before the link sees FP32 and only FP32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sr_optax

BF16 = jnp.bfloat16


def code(q):
  return np.asarray(q).view(np.uint16)


def jit_step(tx):
  @jax.jit
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def stochastic(seed=0, **kwargs):
  return sr_optax.stochastic_rounding(jax.random.key(seed), **kwargs)


def numpy_adamw(w, grads, lr, wd, b1=0.9, b2=0.999, eps=1e-8):
  """AdamW in NumPy FP32, as in Loshchilov and Hutter, decay on the weights."""
  f = np.float32
  w = w.astype(f)
  m, v = np.zeros_like(w), np.zeros_like(w)
  for t, g in enumerate(grads, 1):
    g = g.astype(f)
    m = f(b1) * m + f(1 - b1) * g
    v = f(b2) * v + f(1 - b2) * g * g
    m_hat, v_hat = m / f(1 - b1**t), v / f(1 - b2**t)
    w = w - f(lr) * (m_hat / (np.sqrt(v_hat) + f(eps)) + f(wd) * w)
  return w


@pytest.mark.parametrize('shadow', ['float32', 'residual16'])
def test_the_shadow_is_numpy_adamw_to_a_few_ulps(shadow):
  # Per step the addition rounds to half an ulp of w in each of the two (ulp of
  # |w| < 0.125 is at most 2^-27), and the update of size up to 3 lr differs by
  # 16 roundings of 2^-24 and by the FP32 bias corrections 1 - b^t, whose
  # cancellation costs 2^-24 / (1 - b2) = 6e-5 relative at t = 1.
  rng = np.random.default_rng(0)
  lr, wd, steps = 1e-3, 0.1, 50
  w = jnp.asarray(np.clip(rng.standard_normal(1009) * 0.02, -0.06, 0.06), BF16)
  grads = rng.standard_normal((steps, 1009)).astype(np.float32)
  tx = sr_optax.chain(
    optax.adamw(lr, weight_decay=wd), stochastic(shadow=shadow)
  )
  params, state = w, tx.init(w)
  step = jit_step(tx)
  for g in grads:
    params, state = step(params, state, jnp.asarray(g))
  got = np.asarray(sr_optax.shadow_params(state, params))
  want = numpy_adamw(np.asarray(w), grads, lr, wd)
  bound = steps * (2.0**-27 + 3 * lr * (16 * 2.0**-24 + 6e-5))
  assert np.abs(got.astype(float) - want).max() < bound < steps * lr * 2e-3
  assert np.abs(want - np.asarray(w, np.float32)).max() > 1e-3  # it moved


def test_bf16_gradients_enter_in_fp32():
  # The NumPy reference squares the widened gradient; a BF16 square would be
  # off by 2^-9 relative.
  rng = np.random.default_rng(1)
  g = jnp.asarray(rng.standard_normal(1009), BF16)
  tx = sr_optax.chain(optax.scale_by_adam(), stochastic())
  w = jnp.ones((1009,), BF16)
  _, state = jax.jit(tx.update)(g, tx.init(w), w)
  wide = np.asarray(g, np.float32)
  # (1 - b2) g^2 with three roundings: 1 - b2 itself, the square, the product.
  np.testing.assert_allclose(
    state[0].nu, np.float32(1 - 0.999) * wide * wide, rtol=4 * 2**-24
  )


def test_second_moments_decay_in_the_chain_and_cannot_in_a_plain_one():
  # nu = 1, then 1,000 steps without gradient: 0.999^1000 = 0.368.
  w = jnp.ones((7,), BF16)

  def nu_after(tx):
    state = tx.init(w)
    adam = state[0]
    state = (adam._replace(nu=jnp.ones_like(adam.nu)), *state[1:])

    @jax.jit
    def run(state):
      def body(state, _):
        _, state = tx.update(jnp.zeros_like(w), state, w)
        return state, None

      return jax.lax.scan(body, state, None, length=1000)[0]

    return run(state)[0].nu

  ours = nu_after(sr_optax.chain(optax.scale_by_adam(), stochastic()))
  plain = nu_after(optax.chain(optax.scale_by_adam(), stochastic()))
  # FP32: 1,000 products, each half an ulp.
  np.testing.assert_allclose(ours, 0.999**1000, rtol=1000 * 2**-24 + 5e-5)
  np.testing.assert_array_equal(np.asarray(plain, np.float32), 1.0)


def test_every_float_of_the_inner_state_is_fp32():
  params = {'w': jnp.ones((5, 7), BF16), 'norm': jnp.ones((3,), jnp.float32)}
  for inner in (
    optax.adamw(1e-3),
    optax.lion(1e-3),
    optax.adafactor(1e-3, min_dim_size_to_factor=2),
    optax.sgd(1e-3, momentum=0.9),
    optax.rmsprop(1e-3),
    optax.ema(0.9),
  ):
    tx = sr_optax.chain(optax.clip_by_global_norm(1.0), inner, stochastic())
    state = tx.init(params)
    floats = [
      x.dtype
      for x in jax.tree.leaves(state)
      if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert floats and set(floats) == {jnp.dtype(jnp.float32)}


def test_clipping_acts_in_fp32_over_all_leaves():
  # Global norm 5 of (3, 4) scaled to 1, exactly: 0.6, 0.8 in FP32.
  params = {'a': jnp.ones((1,), BF16), 'b': jnp.ones((1,), BF16)}
  grads = {'a': jnp.full((1,), 3.0, BF16), 'b': jnp.full((1,), 4.0, BF16)}
  tx = sr_optax.chain(
    optax.clip_by_global_norm(1.0), optax.sgd(2.0**-10), stochastic()
  )
  _, state = jax.jit(tx.update)(grads, tx.init(params), params)
  shadow = state[-1].shadow
  # One ulp of 1 and the roundings of the scaled gradient, times 2^-10.
  np.testing.assert_allclose(shadow['a'], 1 - 0.6 / 1024, atol=2**-23)
  np.testing.assert_allclose(shadow['b'], 1 - 0.8 / 1024, atol=2**-23)


def test_schedules_count_steps_in_fp32():
  # The learning rate 2^-12 (1 + t) is exact, so are the sums.
  tx = sr_optax.chain(optax.sgd(lambda t: (1 + t) * 2.0**-12), stochastic())
  params = jnp.ones((5,), BF16)
  state, step = tx.init(params), jit_step(tx)
  for _ in range(5):
    params, state = step(params, state, jnp.ones((5,), BF16))
  shadow = sr_optax.shadow_params(state, params)
  np.testing.assert_array_equal(shadow, np.full(5, 1 - 15 * 2.0**-12))


def test_weight_decay_acts_on_the_shadow():
  # (15/16)^5 has 20 significant bits: exact in FP32 at every step, while the
  # visible weight holds 8, so a decay of it would be off by up to 2^-13.
  tx = sr_optax.chain(
    optax.add_decayed_weights(2.0**-4), optax.scale(-1.0), stochastic()
  )
  params = jnp.ones((101,), BF16)
  state, step = tx.init(params), jit_step(tx)
  for _ in range(5):
    params, state = step(params, state, jnp.zeros((101,), BF16))
  shadow = sr_optax.shadow_params(state, params)
  np.testing.assert_array_equal(shadow, np.full(101, (15 / 16) ** 5))


def test_the_chain_passes_extra_arguments_to_its_links():
  seen = []

  def update(updates, state, params=None, *, value=None, **_):
    seen.append(value)
    return updates, state

  probe = optax.GradientTransformationExtraArgs(
    lambda _: optax.EmptyState(), update
  )
  params = jnp.ones((5,), BF16)
  tx = sr_optax.chain(probe, stochastic())
  tx.update(jnp.ones((5,), BF16), tx.init(params), params, value=3)
  assert seen == [3]


def test_a_chain_of_the_link_alone_is_the_link():
  params = jnp.full((101,), 1.0, BF16)
  u = jnp.full((101,), 2.0**-9, jnp.float32)
  alone, chained = stochastic(), sr_optax.chain(stochastic())
  a, _ = jit_step(alone)(params, alone.init(params), u)
  b, _ = jit_step(chained)(params, chained.init(params), u)
  np.testing.assert_array_equal(code(a), code(b))


def test_the_state_is_the_tuple_of_the_transforms_states():
  params = jnp.ones((5,), BF16)
  tx = sr_optax.chain(optax.clip(1.0), optax.scale_by_adam(), stochastic())
  state = tx.init(params)
  assert isinstance(state, tuple) and len(state) == 3
  assert isinstance(state[1], optax.ScaleByAdamState)
  assert isinstance(state[2], sr_optax.StochasticRoundingState)
  tx = sr_optax.chain(optax.clip(1.0), sr_optax.nearest_rounding())
  assert isinstance(tx.init(params)[1], sr_optax.NearestRoundingState)


def test_upcast_turns_small_floats_into_fp32_and_nothing_else():
  tx = sr_optax.upcast()
  grads = {
    'a': jnp.asarray([1.0, -0.0], BF16),
    'b': jnp.asarray([6e-8], jnp.float16),  # 2^-24, the smallest subnormal
    'c': jnp.ones((3,), jnp.float32),
    'd': jnp.ones((3,), jnp.int32),
  }
  out, _ = jax.jit(tx.update)(grads, tx.init(grads))
  assert [x.dtype.name for x in jax.tree.leaves(out)] == [
    'float32', 'float32', 'float32', 'int32',
  ]  # fmt: skip
  np.testing.assert_array_equal(
    out['a'].view(jnp.uint32), [0x3F800000, 1 << 31]
  )
  np.testing.assert_array_equal(out['b'], [2.0**-24])


def test_the_nearest_link_shows_the_nearest_weights_of_the_same_shadow():
  rng = np.random.default_rng(2)
  params = jnp.asarray(rng.standard_normal(1009) * 0.02, BF16)
  u = jnp.asarray(rng.standard_normal(1009) * 1e-4, jnp.float32)
  tx = sr_optax.chain(optax.scale(1.0), sr_optax.nearest_rounding())
  new, state = jit_step(tx)(params, tx.init(params), u)
  shadow = np.asarray(params, np.float32) + np.asarray(u)
  np.testing.assert_array_equal(state[-1].shadow, shadow)
  np.testing.assert_array_equal(code(new), code(shadow.astype(BF16)))
