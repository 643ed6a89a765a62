import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train import arms, loop, loss_scale
from train.rollout import Completions
from train.step import Batch, TrainState, train_step

pytestmark = pytest.mark.usefixtures('quick_compile')

LENGTHS, WIDTH, GROUP, TIME = (3, 1), 3, 5, 4
BATCH, LR = len(LENGTHS) * GROUP, 1e-3


def drive(finite, scale=8.0):
  """[(scale, skipped)] after each step."""
  state, seen = loss_scale.init(scale), []
  for ok in finite:
    state = loss_scale.update(state, jnp.asarray(bool(ok)))
    seen.append((float(state.scale), int(state.skipped)))
  return seen


def test_it_grows_after_an_interval_and_is_halved_at_an_overflow(monkeypatch):
  monkeypatch.setattr(loss_scale, 'GROWTH_INTERVAL', 3)
  # A step that overflows starts the count of the interval again.
  finite = [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0]
  scales = [8, 8, 16, 16, 16, 8, 8, 8, 16, 8, 4]
  skipped = [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 3]
  assert drive(finite) == list(zip(scales, skipped, strict=True))


def test_with_hysteresis_it_waits_for_overflows_in_a_row(monkeypatch):
  monkeypatch.setattr(loss_scale, 'HYSTERESIS', 2)
  finite = [0, 1, 0, 0, 0, 0, 0, 1]
  scales = [8, 8, 8, 4, 4, 2, 2, 2]
  skipped = [1, 1, 2, 3, 4, 5, 6, 6]
  assert drive(finite) == list(zip(scales, skipped, strict=True))


def test_it_stays_within_its_bounds(monkeypatch):
  assert [scale for scale, _ in drive([0] * 5, 4.0)] == [2, 1, 1, 1, 1]
  monkeypatch.setattr(loss_scale, 'GROWTH_INTERVAL', 1)
  scales = [scale for scale, _ in drive([1] * 4, 2.0**22)]
  assert scales == [2.0**23, 2.0**24, 2.0**24, 2.0**24]


def test_over_10000_finite_steps_it_stays_bounded_and_then_recovers():
  @jax.jit
  def run(state, finite):
    def step(state, ok):
      state = loss_scale.update(state, ok)
      return state, state.scale

    return jax.lax.scan(step, state, finite)

  state, scales = run(loss_scale.init(), jnp.ones(10_000, bool))
  # 2^16, doubled every 400 steps until 2^24 is reached: 8 times.
  want = 2.0 ** np.minimum(16 + np.arange(1, 10_001) // 400, 24)
  np.testing.assert_array_equal(scales, want)
  finite = np.ones(1201, bool)
  finite[0] = False
  state, scales = run(state, jnp.asarray(finite))
  want = 2.0 ** np.minimum(23 + np.arange(1201) // 400, 24)
  np.testing.assert_array_equal(scales, want)
  assert int(state.skipped) == 1
  assert all(np.isfinite(x).all() for x in state)


def test_one_number_that_is_not_finite_is_noticed():
  tree = {'a': jnp.ones((2, 3)), 'b': [jnp.zeros(5, jnp.float16)]}
  assert loss_scale.all_finite(tree)
  for bad in (np.inf, -np.inf, np.nan):
    tree['b'] = [jnp.zeros(5, jnp.float16).at[3].set(bad)]
    assert not loss_scale.all_finite(tree)


@pytest.fixture(scope='module')
def policy(make_small):
  return make_small(layers=1)


@pytest.fixture(scope='module')
def train(policy):
  """One step of the `fp16` arm in a dtype, from a scale and advantages."""
  arm = arms.ARMS['fp16']
  tx = arms.optimizer(arm, LR, jax.random.key(5))
  compiled = {
    dtype: train_step(
      policy.graphdef, tx, temperature=1.0, compute_dtype=jnp.dtype(dtype)
    )
    for dtype in ('float16', 'float32')
  }
  prompts, tokens = policy.prompts(LENGTHS, WIDTH), policy.tokens(BATCH, TIME)
  completions = Completions(
    tokens,
    jnp.full((BATCH, TIME), -3.0),
    jnp.full(BATCH, TIME, jnp.int32),
    jnp.zeros(BATCH, bool),
  )

  def train(dtype, advantages, state=None, scale=2.0**10):
    if state is None:
      weights = jax.tree.map(jnp.copy, policy.params)
      scaler = loss_scale.init(scale) if dtype == 'float16' else None
      state = TrainState(*arms.start(arm, tx, weights), scaler)
    batch = Batch(
      prompts,
      completions,
      jnp.asarray(advantages, jnp.float32),
      jnp.ones(len(advantages), bool),
    )
    before = jax.tree.map(np.array, state)
    after, metrics = compiled[dtype](state, batch, None)
    assert compiled[dtype]._cache_size() == 1
    return before, after, {k: float(v) for k, v in metrics.items()}

  return train


ADVANTAGES = np.resize([0.75, -0.5, 0.25, -1.0, 0.5], BATCH)


def test_a_step_that_overflows_changes_nothing_but_the_scaler(train):
  # The second time with moments that are not 0.
  _, state, _ = train('float16', ADVANTAGES)
  before, after, metrics = train('float16', 1e30 * ADVANTAGES, state)
  kept = before.params, before.opt_state
  for old, new in zip(
    jax.tree.leaves(kept),
    jax.tree.leaves((after.params, after.opt_state)),
    strict=True,
  ):
    assert old.dtype == new.dtype
    assert old.tobytes() == np.asarray(new).tobytes()
  assert after.opt_state[-1].count == 1
  assert before.scaler.scale == 2**10 and after.scaler.scale == 2**9
  assert metrics['loss_scale'] == 2**9 and metrics['skipped_steps'] == 1
  assert all(map(np.isfinite, metrics.values())), metrics
  for name in ('grad_norm', 'changed_fraction', 'stuck_fraction'):
    assert metrics[name] == 0
  # The next one is a step again, and the scale stays.
  _, after, metrics = train('float16', ADVANTAGES, after)
  assert after.opt_state[-1].count == 2
  assert metrics['loss_scale'] == 2**9 and metrics['skipped_steps'] == 1
  assert metrics['changed_fraction'] > 0.1


def test_a_step_in_fp16_is_that_in_fp32_within_its_rounding(train):
  _, got, metrics = train('float16', ADVANTAGES)
  _, want, exact = train('float32', ADVANTAGES)
  assert metrics['skipped_steps'] == 0
  # Roundings of 2^-11 in forward and backward of one layer, sums over the 40
  # tokens of the batch: sqrt(2 * 20 * 40) = 40 of them.
  error = 40 * 2.0**-11
  np.testing.assert_allclose(
    metrics['grad_norm'], exact['grad_norm'], rtol=error
  )
  np.testing.assert_allclose(metrics['entropy'], exact['entropy'], rtol=error)
  # At a ratio of 1 the loss is a mean of the advantages, 0 but for the
  # rounding of its weights: some 60 terms of less than 1.
  for loss in (metrics['loss'], exact['loss']):
    np.testing.assert_allclose(loss, 0, rtol=0, atol=60 * 2.0**-24)
  moments = [
    jax.tree.leaves(optax.tree.get(state.opt_state, 'mu'))
    for state in (got, want)
  ]
  for a, b in zip(*moments, strict=True):
    size = np.abs(b).max()
    assert size > 1e-5
    np.testing.assert_allclose(a, b, rtol=0, atol=error * size)
  # Adam's first step is the gradient's sign: the same for almost all.
  shadows = [
    jax.tree.leaves(state.opt_state[-1].shadow) for state in (got, want)
  ]
  far = [np.abs(a - b) > LR / 2 for a, b in zip(*shadows, strict=True)]
  assert np.mean(np.concatenate([x.ravel() for x in far])) < 0.02


def test_the_scale_does_not_change_a_step(train):
  # Powers of two, as long as nothing falls below FP16's smallest numbers.
  _, low, _ = train('float16', ADVANTAGES, scale=2.0**9)
  _, high, _ = train('float16', ADVANTAGES, scale=2.0**11)
  moments = [
    jax.tree.leaves(optax.tree.get(state.opt_state, 'mu'))
    for state in (low, high)
  ]
  for a, b in zip(*moments, strict=True):
    size = np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-11 * size)


@pytest.mark.parametrize(
  'dtype, state', [('auto', 'idle'), ('float16', 'dynamic')]
)
def test_a_run_says_whether_it_scales_losses(
  runner, tmp_path, monkeypatch, capsys, dtype, state
):
  def stop(self):
    assert (self.state.scaler is None) == (state == 'idle')
    raise FloatingPointError('step 0: enough')

  monkeypatch.setattr(loop.Trainer, 'evaluate', stop)
  out = tmp_path / 'run'
  assert runner.main(out=out, arm='fp16', compute_dtype=dtype) == 1
  output = ' '.join(capsys.readouterr().out.split())
  assert f'loss scaling {state}' in output
