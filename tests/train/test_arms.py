import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sr_optax
from train import arms
from train.arms import ARMS

pytestmark = pytest.mark.usefixtures('quick_compile')

each_arm = pytest.mark.parametrize('name', ARMS)
ROUNDED = [name for name, arm in ARMS.items() if arm.rounding]
SHADOWED = [name for name in ROUNDED if ARMS[name].shadow]
PURE = [name for name in ROUNDED if not ARMS[name].shadow]
SHAPES = {'a': (31, 37), 'b': (41,)}
EPS = 2.0**-24  # half a unit in the last place of float32, relative


def draw(seed, low=-14, high=1):
  """FP32 weights of sizes 2^low to 2^high, between the grid's points."""
  rng = np.random.default_rng(seed)
  return {
    name: jnp.asarray(
      rng.choice([-1, 1], shape) * 2 ** rng.uniform(low, high, shape),
      jnp.float32,
    )
    for name, shape in SHAPES.items()
  }


def start(name, weights, lr=1e-3):
  tx = arms.optimizer(ARMS[name], lr, jax.random.key(5))
  params, state = jax.jit(lambda w: arms.start(ARMS[name], tx, w))(weights)

  @jax.jit
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return params, state, step


def flat(tree):
  return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


def bits(tree):
  return flat(tree).view(np.uint16)


def neighbours(x, dtype):
  """The grid's points below and above FP32 numbers, in magnitude, as bits."""
  near = x.astype(dtype)
  beyond = np.abs(near.astype(np.float32)) > np.abs(x)
  below = near.view(np.uint16) - beyond.astype(np.uint16)
  exact = near.astype(np.float32) == x
  return below, below + ~exact


@each_arm
def test_the_visible_weights_have_the_dtype_of_the_arm(name):
  params, state, step = start(name, draw(1))
  for tree in (params, step(params, state, draw(2))[0]):
    assert {x.dtype for x in jax.tree.leaves(tree)} == {ARMS[name].param_dtype}


@pytest.mark.parametrize('name', SHADOWED)
def test_the_shadow_starts_as_the_fp32_weights_bit_for_bit(name):
  # On the BF16 grid, as policies are, down to sizes that FP16 lacks.
  on_grid = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), draw(1, low=-40)
  )
  for weights in (on_grid, draw(2)):
    params, state, _ = start(name, weights)
    shadow = flat(state[-1].shadow)
    np.testing.assert_array_equal(shadow, flat(weights))
    np.testing.assert_array_equal(
      shadow, flat(sr_optax.shadow_params(state, params))
    )
  assert np.any(flat(on_grid) != flat(on_grid).astype(np.float16))


@each_arm
def test_weights_on_the_bf16_grid_start_as_themselves_in_bf16(name):
  weights = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), draw(1)
  )
  params, _, _ = start(name, weights)
  want = flat(weights)
  if name == 'fp16':
    want = want.astype(np.float16).astype(np.float32)
  np.testing.assert_array_equal(flat(params).astype(np.float32), want)


@each_arm
def test_a_first_step_moves_every_weight_by_the_learning_rate(name):
  # Adam's first step is the sign of the gradient, which clipping keeps.
  lr, weights, grads = 2.0**-7, draw(1, low=-3), draw(2, low=-3)
  params, state, step = start(name, weights, lr)
  before = flat(weights if name not in PURE else params).astype(np.float64)
  params, state = step(params, state, grads)
  want = before - lr * np.sign(flat(grads))
  # Adam: some ten roundings, and its epsilon, 1e-8, against gradients that
  # clipping takes to 2^-3 / 60.
  error = lr * (10 * EPS + 1e-8 * 60 * 8) + EPS * np.abs(want)
  if ARMS[name].shadow or name == 'fp32':
    fp32 = flat(state[-1].shadow if ARMS[name].shadow else params)
    assert np.all(np.abs(fp32 - want) <= error)
  digits = {'float32': 24, 'bfloat16': 8, 'float16': 11}
  unit = 2.0 ** (1 - digits[ARMS[name].param_dtype.name])
  if ARMS[name].rounding == 'nearest':
    unit /= 2
  got = flat(params).astype(np.float64)
  # Within a unit in the last place, or half of one, of the larger of the two.
  size = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(got), np.abs(want))))
  assert np.all(np.abs(got - want) <= error + unit * size / 1.999)


@pytest.mark.parametrize('name', SHADOWED)
def test_the_weights_are_rounded_as_the_arm_promises(name):
  arm = ARMS[name]
  params, state, step = start(name, draw(1))
  for i in range(3):
    shadow = flat(state[-1].shadow)
    if arm.rounding == 'nearest':
      want = shadow.astype(arm.param_dtype).view(np.uint16)
      np.testing.assert_array_equal(bits(params), want)
    else:
      below, above = neighbours(shadow, arm.param_dtype)
      got = bits(params)
      assert np.all((got == below) | (got == above))
      exact = sr_optax.stochastic_round_tree(
        state[-1].last_key, state[-1].shadow
      )
      np.testing.assert_array_equal(got, bits(exact))
      # Up as often as the place between the two says: 4 sigma.
      wide = [x.view(arm.param_dtype).astype(float) for x in (below, above)]
      place = (shadow - wide[0]) / np.where(
        below == above, 1, wide[1] - wide[0]
      )
      up = (got == above) & (below != above)
      sigma = np.sqrt(np.sum(place * (1 - place)))
      assert abs(up.sum() - place.sum()) < 4 * sigma
    params, state = step(params, state, draw(10 + i))


@pytest.mark.parametrize('name', PURE)
def test_pure_arms_keep_no_fp32_weights(name):
  params, state, step = start(name, draw(1))
  for _ in range(2):
    assert state[-1].shadow is None
    size = sum(x.size for x in jax.tree.leaves(params))
    stored = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    keys = 2 * 2 if ARMS[name].rounding == 'stochastic' else 0
    assert stored == 2 * size + keys  # Adam's moments
    params, state = step(params, state, draw(2))


def changed_shares(name, lr):
  """Share of visible weights that each of five steps changes."""
  params, state, step = start(name, draw(1, low=-2, high=-1), lr)
  seen = [bits(params)]
  for i in range(5):
    params, state = step(params, state, draw(10 + i, low=-2, high=-1))
    seen.append(bits(params))
  return np.array([np.mean(a != b) for a, b in itertools.pairwise(seen)])


def test_sticky_noise_changes_few_weights_and_fresh_noise_a_third():
  # All weights have the unit 2^-9 (sizes 1/4 to 1/2), and lie anywhere in it.
  # With new noise at every step a weight at place f changes with 2 f (1 - f),
  # 1/3 on average. With the same noise it changes if the step crosses its
  # threshold: step / unit.
  size, lr = 31 * 37 + 41, 1e-6
  fresh, sticky = (
    changed_shares(name, lr) for name in ('bf16-sr', 'bf16-sr-sticky')
  )
  sigma = np.sqrt(1 / 3 * 2 / 3 / size)
  assert np.all(np.abs(fresh - 1 / 3) < 4 * sigma)
  expected = 5 * size * lr * 2**9  # a Poisson number
  assert sticky.sum() * size < expected + 4 * np.sqrt(expected)
  # Larger steps are seen: 1 in 10 weights crosses.
  seen = changed_shares('bf16-sr-sticky', 0.1 * 2.0**-9)[0]
  assert abs(seen - 0.1) < 4 * np.sqrt(0.1 * 0.9 / size)


def test_nearest_rounding_sees_nothing_of_small_steps_from_the_grid():
  weights = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), draw(1, low=-2)
  )
  for name in ('bf16', 'bf16-pure'):
    params, state, step = start(name, weights, lr=1e-6)
    before = bits(params)
    params, state = step(params, state, draw(2))
    np.testing.assert_array_equal(bits(params), before)
