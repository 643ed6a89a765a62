"""Emitted updates land on exactly the rounded weights.

`optax.apply_updates` computes `(p + u)` in FP32 and rounds it to the grid, so
an update can only express what one FP32 sum can. Where it cannot:

1. a target of -0.0 (the sum is +0.0) unless nothing changes;
2. sums that the backend flushes to zero (below 2^-118);
3. a weight that shrinks by more than 2^16 in one step (2^13 in FP16), and
   |q - p| beyond the largest FP32. No FP32 update lands there, see
   `test_no_fp32_update_expresses_...`.

`sr_optax.apply_updates` writes the rounded weights and lands always.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sr_optax
from sr_optax import link

BF16 = jnp.bfloat16
LIMIT = {'bfloat16': 2.0**16, 'float16': 2.0**13}


def code(q):
  return np.asarray(q).view(np.uint16)


def value(bits, target=BF16):
  return np.asarray(np.asarray(bits, np.uint16).view(target), np.float32)


@functools.partial(jax.jit, static_argnums=(2, 3))
def apply_both(p, u, target, shadow='float32'):
  """One step of a link by updates `u`: what optax lands on, ours, and truth."""
  tx = sr_optax.stochastic_rounding(
    jax.random.key(0), dtype=target, shadow=shadow
  )
  updates, state = tx.update(u, tx.init(p), p)
  truth = sr_optax.stochastic_round_tree(state.last_key, state.shadow, target)
  return (
    optax.apply_updates(p, updates),
    sr_optax.apply_updates(p, updates, state),
    truth,
  )


def adversarial_pairs(seed, n, target):
  """Random finite weights (all patterns) and targets near and far."""
  rng = np.random.default_rng(seed)
  inf = 0x7F80 if target == BF16 else 0x7C00
  sign = rng.integers(0, 2, (2, n), np.uint16) << 15
  p = rng.integers(0, inf, n, np.uint16) | sign[0]
  far = rng.integers(0, inf, n, np.uint16)
  near = np.clip(
    (p & 0x7FFF).astype(int) + rng.integers(-2000, 2000, n), 0, inf - 1
  )
  special = rng.choice([0, 1, 2, 0x7F, 0x80, inf - 1, 0x3C00, 0x3F80], n)
  kind = rng.integers(0, 3, n)
  q = np.where(kind == 0, far, np.where(kind == 1, near, special))
  q = q.astype(np.uint16) | sign[1]
  between = rng.integers(0, 2**16, n, np.uint32)  # off the grid
  if target == BF16:
    goal = (q.astype(np.uint32) << 16 | between).view(np.float32)
  else:
    goal = value(q, target) * (1 + between.astype('f4') * np.float32(2**-27))
  return p.view(target), goal


@pytest.mark.parametrize('target', [BF16, jnp.float16])
def test_our_apply_updates_always_lands(target):
  p, goal = adversarial_pairs(0, 300_007, target)
  with np.errstate(over='ignore'):
    u = goal - np.asarray(p, np.float32)
  _, ours, truth = apply_both(p, u, target)
  np.testing.assert_array_equal(code(ours), code(truth))


@pytest.mark.parametrize('target', [BF16, jnp.float16])
def test_optax_apply_updates_lands_but_for_the_stated_exceptions(target):
  p, goal = adversarial_pairs(1, 300_007, target)
  with np.errstate(over='ignore'):
    u = goal - np.asarray(p, np.float32)
  landed, _, truth = apply_both(p, u, target)
  p, q = (np.asarray(x).astype(np.float64) for x in (p, truth))
  minus_zero = (code(truth) == 0x8000) & (code(landed) == 0)
  flushed = (np.abs(q) < 2.0**-118) & (q != 0)
  shrinks = np.abs(p) > LIMIT[jnp.dtype(target).name] * np.abs(q)
  overflows = np.abs(q - p) > np.finfo(np.float32).max
  excused = minus_zero | flushed | (shrinks & (q != 0)) | overflows
  wrong = code(landed) != code(truth)
  assert not (wrong & ~excused).any()
  # The test is not empty: most pairs are not excused, and far ones are there.
  assert (~excused).mean() > 0.5 and (np.abs(q) > 2**8 * np.abs(p)).any()


@pytest.mark.parametrize('shadow', ['float32', 'residual16', None])
def test_optax_apply_updates_lands_on_realistic_steps(shadow):
  # Weights N(0, 0.02), Adam-sized steps of several learning rates, 20 steps.
  rng = np.random.default_rng(2)
  p = jnp.asarray(rng.standard_normal(10_007) * 0.02, BF16)
  tx = sr_optax.stochastic_rounding(jax.random.key(1), shadow=shadow)

  @jax.jit
  def step(p, state, u):
    shadow = sr_optax.shadow_params(state, p)
    updates, state = tx.update(u, state, p)
    truth = sr_optax.stochastic_round_tree(state.last_key, shadow + u)
    landed = optax.apply_updates(p, updates)
    return landed, state, truth, sr_optax.apply_updates(p, updates, state)

  state = tx.init(p)
  for i in range(20):
    lr = [1e-6, 1e-4, 1e-2, 1.0][i % 4]
    u = jnp.asarray(rng.standard_normal(10_007) * lr, jnp.float32)
    p, state, truth, ours = step(p, state, u)
    zero = (code(truth) & 0x7FFF) == 0
    np.testing.assert_array_equal(code(p)[~zero], code(truth)[~zero])
    np.testing.assert_array_equal(code(ours)[~zero], code(truth)[~zero])


def landing_by_ratio(target, p_bits):
  """For p in one binade against every finite q: (|p| / |q|, lands)."""
  inf = 0x7F80 if target == BF16 else 0x7C00
  q_bits = np.concatenate(
    [np.arange(1, inf), np.arange(0x8001, 0x8000 + inf)]
  ).astype(np.uint16)
  q = jnp.asarray(q_bits.view(target))

  @jax.jit
  def land(p):
    p = jnp.full(q.shape, p)
    return optax.apply_updates(p, link.difference(q, p))

  lands = np.stack([code(land(p)) == q_bits for p in p_bits.view(target)])
  ratio = np.abs(
    value(p_bits, target)[:, None].astype(float) / value(q_bits, target)
  )
  return ratio, lands


def test_every_bf16_pair_lands_up_to_a_ratio_of_65793():
  # All p in [1, 2) x all q. Scaling by a power of two is exact, so this is
  # every pair whose sums and differences neither over- nor underflow.
  p_bits = np.arange(0x3F80, 0x4000, dtype=np.uint16)
  ratio, lands = landing_by_ratio(BF16, p_bits)
  worst = ratio[~lands].min()
  # p = 1.0, q = -(2 - 2^-7) 2^-17: -1 - |q| needs one bit more than FP32 has.
  assert worst == 1 / ((2 - 2**-7) * 2.0**-17) > LIMIT['bfloat16']
  assert lands[ratio < worst].all()
  assert lands[ratio < 1].all()  # a weight may grow by any factor


def test_every_fp16_pair_lands_up_to_a_ratio_of_8193():
  # The same with 11 significant bits; q below 2^-14 is on the coarser
  # subnormal grid and only easier to reach. 64 of 1,024 mantissas of p.
  # p is in the top binade, so that q stays normal at the limit.
  p_bits = np.arange(0x7800, 0x7C00, 16, dtype=np.uint16)
  p_bits = np.concatenate([p_bits, p_bits + 1])
  ratio, lands = landing_by_ratio(jnp.float16, p_bits)
  worst = ratio[~lands].min()
  assert worst == 1 / ((2 - 2**-10) * 2.0**-14) > LIMIT['float16']
  assert lands[ratio < worst].all()


def test_no_fp32_update_expresses_a_weight_that_shrinks_more_than_that():
  # p + u is monotone in u. Of all FP32 u around -p, 2^15 words to each side,
  # the sums reach from far below q to far above q, and none rounds to q.
  p, q = np.uint16(0x3F81), np.uint16(0x377F)  # ratio 66,307
  center = (value(p) * -1).view(np.uint32).astype(np.int64)
  u = (center + np.arange(-(2**15), 2**15)).astype(np.uint32).view(np.float32)
  sums = value(p) + u
  assert sums.min() < value(q) / 2 and sums.max() > value(q) * 2
  assert (np.abs(np.diff(np.sort(sums))) <= value(q)).all()  # no gap in reach
  landed = code(sums.astype(BF16))
  assert not (landed == q).any()
  # The neighbours of q are both reached: the grid of sums is too coarse.
  assert (landed == q - 1).any() and (landed == q + 1).any()


def test_no_fp32_update_expresses_a_difference_beyond_the_largest_fp32():
  # From -1.7e38 to 3.4e38: the largest update falls short, the next is Inf.
  total = value(np.uint16(0xFF00)) + np.finfo(np.float32).max
  assert code(total.astype(BF16)) < 0x7F7F


def test_minus_zero_stays_minus_zero_where_nothing_changes():
  p = jnp.array([-0.0, 0.0, -0.0], BF16)
  landed, ours, truth = apply_both(p, jnp.array([-0.0, 0.0, 0.0]), BF16)
  np.testing.assert_array_equal(code(truth), [0x8000, 0, 0])
  np.testing.assert_array_equal(code(ours), [0x8000, 0, 0])
  np.testing.assert_array_equal(code(landed), [0x8000, 0, 0])


def test_our_apply_updates_writes_minus_zero_where_optax_cannot():
  # From the smallest positive subnormal 2^-133 to -2^-134, in between -0.0 and
  # the first negative one. FP32 is the sum of words here: no arithmetic.
  p = jnp.asarray(np.full(101, 1, np.uint16).view(BF16))
  tx = sr_optax.stochastic_rounding(jax.random.key(0))
  state = tx.init(p)
  half = np.full(101, 0x80008000, np.uint32).view(np.float32)
  state = state._replace(shadow=half)
  truth = code(sr_optax.stochastic_round_tree(state.last_key, half))
  assert set(truth) == {0x8000, 0x8001}
  updates = link.difference(jnp.asarray(truth.view(BF16)), p)
  ours = sr_optax.apply_updates(p, updates, state)
  np.testing.assert_array_equal(code(ours), truth)
  assert (code(optax.apply_updates(p, updates)) != truth).any()


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('rate', ['python', 'bfloat16', 'numpy'])
def test_updates_are_fp32_whatever_the_gradients_and_learning_rate(dtype, rate):
  lr = {
    'python': 1e-3,
    'bfloat16': jnp.bfloat16(1e-3),
    'numpy': np.float32(1e-3).astype(BF16),
  }[rate]
  params = {'w': jnp.ones((3, 5), BF16)}
  tx = sr_optax.chain(
    optax.sgd(lr), sr_optax.stochastic_rounding(jax.random.key(3))
  )
  grads = {'w': jnp.ones((3, 5), dtype)}
  updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
  assert updates['w'].dtype == jnp.float32
  assert state[-1].shadow['w'].dtype == jnp.float32
  assert optax.apply_updates(params, updates)['w'].dtype == BF16
  # The shadow moved by the learning rate: one FP32 rounding of 1 - lr.
  np.testing.assert_array_equal(
    state[-1].shadow['w'], np.full((3, 5), 1 - np.float32(lr))
  )
