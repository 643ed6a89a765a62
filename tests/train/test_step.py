import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sr_optax
from train import arms, losses
from train.rollout import Completions
from train.scoring import completion_hidden
from train.step import (
  Batch,
  Objective,
  Reference,
  TrainState,
  train_step,
)

pytestmark = pytest.mark.usefixtures('quick_compile')

LENGTHS, WIDTH, GROUP, TIME = (6, 1, 4), 6, 5, 6
BATCH, TEMPERATURE = len(LENGTHS) * GROUP, 0.7  # that of `unshared_loss`
LR, STEPS = 1e-3, 2
EPS = 2.0**-24  # half a unit in the last place of float32, relative
ARMS = ('fp32', 'bf16', 'bf16-sr')
each_arm = pytest.mark.parametrize('arm', ARMS)


def leaves(tree):
  """NumPy copies by path: donated buffers must not show through."""
  return {
    jax.tree_util.keystr(path): np.array(leaf)
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def bits(x):
  return np.asarray(x).view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


@pytest.fixture(scope='module')
def small(make_small):
  return make_small(layers=1)


@pytest.fixture(scope='module')
def other(make_small):
  """The reference policy."""
  return make_small(layers=1, seed=9)


@pytest.fixture(scope='module')
def batches(small):
  """Two batches: the gradient of the first is clipped, the second's is not."""
  prompts, tokens = small.prompts(LENGTHS, WIDTH), small.tokens(BATCH, TIME)
  rng = np.random.default_rng(6)
  lengths = rng.integers(1, TIME + 1, BATCH)
  lengths[:2] = 1, TIME
  mask = np.arange(TIME) < lengths[:, None]
  log_p = small.numpy_log_p(prompts, tokens, TEMPERATURE)
  logprobs = chosen(log_p, tokens) + 0.1 * rng.normal(size=(BATCH, TIME))
  completions = Completions(
    tokens,
    jnp.asarray(np.where(mask, logprobs, 0), jnp.float32),
    jnp.asarray(lengths, jnp.int32),
    jnp.asarray(lengths < TIME),
  )
  # Sums of these are exact.
  advantages = rng.integers(-8, 9, BATCH)
  return [
    Batch(
      prompts,
      completions,
      jnp.asarray(advantages * scale, jnp.float32),
      jnp.ones(BATCH, bool),
    )
    for scale in (2.0, -1 / 64)
  ]


def chosen(log_p, tokens):
  return np.take_along_axis(log_p, np.asarray(tokens)[..., None], axis=-1)[
    ..., 0
  ]


@pytest.fixture(scope='module')
def reference(small, other, batches):
  @jax.jit
  def hidden(params):
    return completion_hidden(
      nnx.merge(small.graphdef, params),
      batches[0].prompts,
      batches[0].completions.tokens,
      compute_dtype=jnp.float32,
    )

  return Reference(other.cast(jnp.bfloat16), hidden(other.params))


@pytest.fixture(scope='module')
def train(small, batches, reference):
  """Runs two steps of an arm: [before, after 1, after 2], and metrics."""
  compiled = {}
  for name in ARMS:
    tx = arms.optimizer(arms.ARMS[name], LR, jax.random.key(5))
    options = dict(temperature=TEMPERATURE, compute_dtype=jnp.float32)
    compiled[name] = tx, train_step(small.graphdef, tx, **options)

  def train(arm):
    tx, step = compiled[arm]
    params = small.cast(arms.ARMS[arm].param_dtype)
    params = jax.tree.map(jnp.copy, params)  # donated
    state = TrainState(params, tx.init(params))
    states, metrics = [snapshot(arm, state)], []
    for batch in batches:
      given = state
      state, measured = step(given, batch, reference)
      states.append(snapshot(arm, state))
      metrics.append({k: np.array(v) for k, v in measured.items()})
      # Weights, moments and shadow; `last_key` is no input to a step.
      assert all(x.is_deleted() for x in jax.tree.leaves(given) if x.ndim > 1)
    assert step._cache_size() == 1
    return states, metrics

  return train


def snapshot(arm, state):
  """(weights, FP32 weights behind them, what the noise would make of them)."""
  params = leaves(state.params)
  if arm == 'fp32':
    return params, params, params
  link = state.opt_state[-1]
  shadow = leaves(link.shadow)
  if arm == 'bf16':
    rounded = {k: x.astype(jnp.bfloat16) for k, x in shadow.items()}
  else:
    rounded = leaves(sr_optax.stochastic_round_tree(link.last_key, link.shadow))
  return params, shadow, rounded


@pytest.fixture(scope='module')
def runs(train):
  return {arm: train(arm) for arm in ARMS}


@each_arm
def test_the_fp32_weights_follow_clipped_adamw_written_in_numpy(
  arm, runs, small, batches, unshared_loss
):
  states, metrics = runs[arm]
  mean, square, clipped = {}, {}, []
  for i, batch in enumerate(batches):
    # Gradients at the visible weights, by the computation without sharing.
    paths = iter(states[i][0].values())
    params = jax.tree.map(
      lambda _, paths=paths: jnp.asarray(next(paths), jnp.float32), small.params
    )
    tokens = batch.completions.tokens
    full, slots = small.unshared(batch.prompts, tokens)
    _, grads = unshared_loss(
      params, full, slots, tokens, batch.advantages, batch.completions.mask
    )
    grads = {k: x.astype(np.float64) for k, x in leaves(grads).items()}
    norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    np.testing.assert_allclose(metrics[i]['grad_norm'], norm, rtol=85 * EPS)
    clipped.append(norm > 1)
    for k, g in grads.items():
      noise = 85 * EPS * np.abs(g).max() / max(norm, 1)  # see test_scoring.py
      g = g / max(norm, 1)
      mean[k] = 0.9 * mean.get(k, 0) + 0.1 * g
      square[k] = 0.95 * square.get(k, 0) + 0.05 * g**2
      m = mean[k] / (1 - 0.9 ** (i + 1))
      v = np.sqrt(square[k] / (1 - 0.95 ** (i + 1))) + 1e-8
      want = states[i][1][k].astype(np.float64) - LR * m / v
      # What the noise of the gradients does to m / v, at most a change of
      # sign; ten roundings of the step and one of the weight.
      error = np.minimum(4 * noise / v, 2) + 10 * EPS
      error = LR * error + 2 * EPS * np.abs(want)
      assert np.all(np.abs(states[i + 1][1][k] - want) <= error), (i, k)
      assert np.median(4 * noise / v) < 0.01  # the test means something
  assert clipped == [True, False]


@each_arm
def test_the_visible_weights_are_the_rounding_of_the_fp32_weights(arm, runs):
  for params, _, rounded in runs[arm][0]:
    for path, p in params.items():
      assert p.dtype == arms.ARMS[arm].param_dtype
      np.testing.assert_array_equal(bits(p), bits(rounded[path]))


def test_stochastic_rounding_differs_from_nearest_where_it_should(runs):
  near, stochastic = (runs[arm][0][1] for arm in ('bf16', 'bf16-sr'))
  p, q = (
    np.concatenate([x.ravel() for x in state[0].values()])
    for state in (near, stochastic)
  )
  assert 0.05 < np.mean(p != q) < 0.5


def test_all_arms_have_the_same_gradients_on_the_first_step(runs):
  # All start from the same weights, on the BF16 grid.
  _, want, _ = runs['fp32'][0][1]
  for arm in ('bf16', 'bf16-sr'):
    states, metrics = runs[arm]
    for name in ('loss', 'grad_norm', 'entropy', 'kl_exact', 'kl_k3'):
      np.testing.assert_allclose(
        metrics[0][name], runs['fp32'][1][0][name], rtol=85 * EPS
      )
    for path, shadow in states[1][1].items():
      error = np.abs(shadow - want[path])
      assert np.mean(error <= 4 * EPS * np.abs(want[path])) > 0.9
      assert error.max() <= 2 * LR


@each_arm
def test_changed_and_stuck_weights_are_counted(arm, runs):
  states, metrics = runs[arm]
  for i in range(STEPS):
    (old, old_shadow, _), (new, new_shadow, _) = states[i : i + 2]
    size = sum(x.size for x in old.values())
    changed = {k: bits(old[k]) != bits(new[k]) for k in old}
    stuck = {
      k: (bits(old_shadow[k]) != bits(new_shadow[k])) & ~changed[k] for k in old
    }
    for name, marks in (('changed', changed), ('stuck', stuck)):
      count = sum(int(x.sum()) for x in marks.values())
      np.testing.assert_allclose(
        metrics[i][f'{name}_fraction'], count / size, rtol=4 * EPS
      )
      if arm != 'fp32':
        assert 0 < count < size
  if arm == 'fp32':
    assert metrics[0]['changed_fraction'] > 0.9
    assert metrics[0]['stuck_fraction'] == 0


def test_the_loss_is_that_of_a_ratio_of_1(runs, batches):
  for batch, metrics in zip(batches, runs['bf16-sr'][1], strict=True):
    lengths = np.asarray(batch.completions.lengths)
    want = -np.sum(np.asarray(batch.advantages) * lengths) / (BATCH * TIME)
    np.testing.assert_allclose(metrics['loss'], want, rtol=2 * EPS)


def test_metrics_of_tokens_equal_those_by_hand(runs, small, other, batches):
  prompts, completions = batches[0][:2]
  mask = np.asarray(completions.mask)
  log_p, log_q = (
    p.numpy_log_p(prompts, completions.tokens, TEMPERATURE)
    for p in (small, other)
  )
  p, q = (chosen(x, completions.tokens) for x in (log_p, log_q))
  sampled = np.asarray(completions.logprobs, np.float64)
  metrics = runs['fp32'][1][0]
  tokens = mask.sum()
  want = {
    'entropy': -np.sum(np.exp(log_p) * log_p, axis=-1)[mask].sum() / tokens,
    'kl_exact': np.sum(np.exp(log_p) * (log_p - log_q), -1)[mask].sum() / BATCH,
    'kl_k1': (p - q)[mask].sum() / BATCH,
    'kl_k2': ((p - q) ** 2 / 2)[mask].sum() / BATCH,
    'kl_k3': (np.exp(q - p) - 1 - (q - p))[mask].sum() / BATCH,
    'mismatch_k1': (sampled - p)[mask].sum() / tokens,
    'mismatch_k3': (np.exp(p - sampled) - 1 - (p - sampled))[mask].mean(),
    'mismatch_probability': np.abs(np.exp(p) - np.exp(sampled))[mask].max(),
    'phantom_clip_fraction': np.mean(
      np.abs(np.exp(p - sampled) - 1)[mask] > 0.2
    ),
  }
  # Log-probabilities are known to about 40 roundings of logits of 16 units,
  # which k3 multiplies by the largest ratio of the batch.
  atol = 40 * 16 * EPS / TEMPERATURE
  ratio = np.maximum(np.exp(q - p), np.abs(p - q))[mask].max()
  for name, expected in want.items():
    factor = ratio * TIME if name in ('kl_k2', 'kl_k3') else TIME
    np.testing.assert_allclose(
      metrics[name], expected, rtol=0, atol=atol * factor, err_msg=name
    )
    assert metrics[name].dtype == np.float32
  assert want['kl_exact'] > 0.1
  # The noise of the sampler's log-probabilities, 0.1, goes beyond the clip's
  # 0.2 for a few tokens.
  assert 0 < want['phantom_clip_fraction'] < 0.2


def test_the_penalty_adds_the_gradient_of_the_exact_divergence(
  small, other, batches, reference
):
  weight, batch = 0.3, batches[1]
  tx = optax.sgd(1.0)  # what a step subtracts is the gradient
  step = train_step(
    small.graphdef,
    tx,
    temperature=TEMPERATURE,
    compute_dtype=jnp.float32,
    objective=Objective(kl_penalty=weight),
  )
  params = jax.tree.map(jnp.copy, small.params)
  state, metrics = step(TrainState(params, tx.init(params)), batch, reference)

  # Written out: no shared prompts, no chunks, the reference by itself.
  full, slots = small.unshared(batch.prompts, batch.completions.tokens)
  log_q = jax.nn.log_softmax(
    small.logits(other.params, full, slots) / TEMPERATURE
  )
  mask = batch.completions.mask

  @jax.jit
  @jax.value_and_grad
  def loss(params):
    log_p = jax.nn.log_softmax(small.logits(params, full, slots) / TEMPERATURE)
    logprobs = jnp.take_along_axis(
      log_p, batch.completions.tokens[..., None], axis=-1
    )[..., 0]
    policy = -batch.advantages[:, None] * jnp.exp(
      logprobs - jax.lax.stop_gradient(logprobs)
    )
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return jnp.sum((policy + weight * kl) * mask) / mask.size

  value, want = loss(small.params)
  np.testing.assert_allclose(metrics['loss'], value, rtol=85 * EPS)
  np.testing.assert_allclose(
    metrics['grad_norm'], optax.tree.norm(want), rtol=85 * EPS
  )
  got, want = leaves(state.params), leaves(want)
  for path, before in leaves(small.params).items():
    size = np.abs(want[path]).max()
    # As the other gradients, and the rounding of the weights after the step.
    error = 85 * EPS * size + EPS * (np.abs(before) + size)
    assert np.all(np.abs(before - got[path] - want[path]) <= error), path
  # Most of it is the penalty's.
  assert weight * metrics['kl_exact'] / TIME > abs(metrics['loss']) / 2


def test_the_same_seed_gives_the_same_steps_bit_for_bit(runs, train):
  states, metrics = train('bf16-sr')
  want_states, want_metrics = runs['bf16-sr']
  for got, want in zip(metrics, want_metrics, strict=True):
    np.testing.assert_equal(got, want)
  for path, p in states[-1][0].items():
    np.testing.assert_array_equal(bits(p), bits(want_states[-1][0][path]))


def test_without_a_reference_no_divergence_is_measured(small, batches):
  tx = arms.optimizer(arms.ARMS['bf16-sr'], LR, jax.random.key(5))
  params = small.cast(jnp.bfloat16)
  options = dict(temperature=TEMPERATURE, compute_dtype=jnp.float32)
  step = train_step(small.graphdef, tx, **options)
  state, metrics = jax.eval_shape(
    step, TrainState(params, tx.init(params)), batches[0], None
  )
  assert {'loss', 'grad_norm', 'entropy'} <= set(metrics)
  assert not {'kl_exact', 'kl_k3'} & set(metrics)
  assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(state.params))


def gradient_of(small, batch, reference=None, **options):
  """The gradient of a step, and its metrics."""
  tx = optax.sgd(1.0)
  options = dict(temperature=TEMPERATURE, compute_dtype=jnp.float32) | options
  step = train_step(small.graphdef, tx, **options)
  params = jax.tree.map(jnp.copy, small.params)
  state, metrics = step(TrainState(params, tx.init(params)), batch, reference)
  before, after = leaves(small.params), leaves(state.params)
  return {k: before[k] - after[k] for k in before}, metrics


CLIPPED = Objective(
  functools.partial(losses.ppo_clip, clip_low=0.1, clip_high=0.2),
  'token-mean',
  'sequence-truncated',
  1.1,
  kl_penalty=0.1,
)


@pytest.fixture(scope='module')
def later(batches):
  """A batch of a later update, of which a group was filtered out."""
  completions = batches[0].completions
  rng = np.random.default_rng(3)
  old = completions.logprobs + jnp.asarray(
    0.2 * rng.normal(size=(BATCH, TIME)), jnp.float32
  )
  trained = np.repeat([True, False, True], GROUP)
  return batches[0]._replace(trained=jnp.asarray(trained), old_logprobs=old)


@pytest.mark.parametrize('objective', [Objective(), CLIPPED])
def test_micro_batches_have_the_same_gradient(
  objective, small, later, reference
):
  whole, metrics = gradient_of(small, later, reference, objective=objective)
  parts, measured = gradient_of(
    small, later, reference, objective=objective, micro_batches=len(LENGTHS)
  )
  for path, want in whole.items():
    size = np.abs(want).max()
    assert size > 0
    # As other gradients, and two roundings of a weight of up to 2.
    np.testing.assert_allclose(
      parts[path], want, rtol=0, atol=85 * EPS * size + 4 * EPS
    )
  for name, want in metrics.items():
    np.testing.assert_allclose(
      measured[name], want, rtol=85 * EPS, atol=85 * EPS, err_msg=name
    )
  if objective is CLIPPED:
    assert 0.1 < metrics['clip_fraction'] < 0.9
    assert 0.1 < metrics['sampler_weight'] < 1.1


@pytest.mark.parametrize('objective', [Objective(), CLIPPED])
def test_permuting_the_batch_changes_neither_loss_nor_gradient(
  objective, small, later, reference
):
  rng = np.random.default_rng(8)
  order = np.array([2, 0, 1])
  within = [rng.permutation(GROUP) for _ in order]
  rows = np.concatenate(
    [p * GROUP + inner for p, inner in zip(order, within, strict=True)]
  )
  prompts = jax.tree.map(lambda x: x[order], later.prompts)
  others = jax.tree.map(lambda x: x[rows], later[1:])
  permuted = Batch(prompts, *others)
  moved = reference._replace(hidden=reference.hidden[rows])
  base, metrics = gradient_of(small, later, reference, objective=objective)
  got, measured = gradient_of(small, permuted, moved, objective=objective)
  for path, want in base.items():
    size = np.abs(want).max()
    assert size > 0
    # As other gradients, and two roundings of a weight of up to 2.
    np.testing.assert_allclose(
      got[path], want, rtol=0, atol=85 * EPS * size + 4 * EPS
    )
  for name, want in metrics.items():
    np.testing.assert_allclose(
      measured[name], want, rtol=85 * EPS, atol=85 * EPS, err_msg=name
    )


def test_the_objective_is_the_weighted_sum_by_hand(small, later, reference):
  batch, mask = later, np.asarray(later.completions.mask)
  log_p = small.numpy_log_p(
    batch.prompts, batch.completions.tokens, TEMPERATURE
  )
  p = chosen(log_p, batch.completions.tokens)
  old = np.asarray(batch.old_logprobs, np.float64)
  advantages = np.asarray(batch.advantages, np.float64)[:, None]
  ratio = np.exp(np.where(mask, p - old, 0))
  values = -np.minimum(
    advantages * ratio, advantages * np.clip(ratio, 0.9, 1.2)
  )
  sampled = np.asarray(batch.completions.logprobs, np.float64)
  weight = np.exp(np.sum(np.where(mask, old - sampled, 0), axis=1))
  values *= np.minimum(weight, 1.1)[:, None]
  trained = mask & np.asarray(batch.trained)[:, None]
  want = values[trained].sum() / trained.sum()
  objective = CLIPPED._replace(kl_penalty=0.0)
  _, metrics = gradient_of(small, batch, reference, objective=objective)
  np.testing.assert_allclose(
    metrics['loss'], want, rtol=0, atol=40 * 16 * EPS / TEMPERATURE * 50
  )


def test_filtered_completions_have_no_influence(small, later):
  changed = jnp.where(later.trained, later.advantages, 1e3)
  base, _ = gradient_of(small, later)
  other, _ = gradient_of(small, later._replace(advantages=changed))
  for path, want in base.items():
    np.testing.assert_array_equal(other[path], want)
