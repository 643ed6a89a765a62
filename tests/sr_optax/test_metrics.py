"""Sticking metrics, against values worked out by hand and in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sr_optax

BF16, FP16 = jnp.bfloat16, jnp.float16
ULP = 2.0**-7  # distance of BF16 neighbours in [1, 2)
measure = jax.jit(sr_optax.sticking_metrics)


def nearest_state(shadow):
  return sr_optax.NearestRoundingState(jnp.int32(0), shadow)


def metrics_of(v0, s0, v1, s1, **start):
  """Metrics of one leaf 'w' whose weights and shadows are given as lists."""
  v0, v1 = ({'w': jnp.array(v, BF16)} for v in (v0, v1))
  s0, s1 = (nearest_state({'w': jnp.array(s, jnp.float32)}) for s in (s0, s1))
  return measure(v0, s0, v1, s1, **start)


def scalars(metrics):
  return {k: float(x) for k, x in metrics.items() if k != 'leaves'}


def test_five_weights_worked_out_by_hand():
  metrics = metrics_of(
    # moves | sticks | nothing | redrawn while the shadow rests | moves back
    [1, 1, 1, 1, 1 + ULP],
    [1, 1, 1, 1 + ULP / 4, 1 + ULP],
    [1 + ULP, 1, 1, 1 + ULP, 1],
    [1 + ULP / 2, 1 + ULP / 4, 1, 1 + ULP / 4, 1 + ULP / 4],
  )
  got = scalars(metrics)
  assert got['changed_fraction'] == np.float32(3 / 5)
  assert got['stuck_fraction'] == np.float32(1 / 5)
  # Shadows move by 1/2, 1/4, 0, 0 and 3/4 of a grid step.
  assert got['least_changed_fraction'] == np.float32(1.5 / 5)
  # dvisible - dshadow in ulps: 1/2, -1/4, 0, 1, -1/4; dshadow 1/2, 1/4, 0, 0,
  # -3/4.
  noise = 1 / 4 + 1 / 16 + 1 + 1 / 16
  step = 1 / 4 + 1 / 16 + 9 / 16
  assert got['noise_ratio'] == pytest.approx(math.sqrt(noise / step), rel=1e-6)
  assert got['foreign_count'] == got['nan_count'] == got['overflow_count'] == 0
  assert scalars(metrics['leaves']['w']) == got


def test_slope_is_the_projection_on_the_shadow_displacement():
  # Shadow displacements 1/2, 2, 9/2 ulps, visible 0, 2, 5:
  # (0 + 4 + 45/2) / (1/4 + 4 + 81/4) = 53 / 49.
  shadow = [1 + ULP / 2, 1 + 2 * ULP, 1 + 4.5 * ULP]
  visible = [1, 1 + 2 * ULP, 1 + 5 * ULP]
  for dtype in (BF16, jnp.float32):
    start = {'w': jnp.ones(3, dtype)}
    metrics = metrics_of(visible, shadow, visible, shadow, start_params=start)
    slope = float(metrics['displacement_slope'])
    assert slope == pytest.approx(53 / 49, rel=1e-6)
  assert float(metrics['noise_ratio']) == 0  # 0 / 0: neither moved


def test_undefined_ratios_are_as_documented():
  one = [1.0, 1.0]
  redrawn = metrics_of(one, [1 + ULP / 4] * 2, [1 + ULP, 1], [1 + ULP / 4] * 2)
  assert float(redrawn['noise_ratio']) == math.inf
  start = {'w': jnp.ones(2, BF16)}
  rest = metrics_of(one, one, one, one, start_params=start)
  assert math.isnan(rest['displacement_slope'])
  assert float(rest['noise_ratio']) == 0


def test_a_leaf_of_size_zero_counts_nothing():
  empty = {'w': jnp.zeros((0, 3), BF16)}
  state = nearest_state({'w': jnp.zeros((0, 3), jnp.float32)})
  got = scalars(measure(empty, state, empty, state))
  assert got == dict.fromkeys(got, 0.0)


@pytest.mark.parametrize(
  'dtype, largest', [(BF16, float(jnp.finfo(BF16).max)), (FP16, 65504.0)]
)
def test_nan_and_saturated_weights_are_counted_and_left_out_of_ratios(
  dtype, largest
):
  old = jnp.ones(7, dtype)
  new = jnp.array([jnp.nan, jnp.inf, -jnp.inf, largest, -largest, 1, 2], dtype)
  state = nearest_state({'w': jnp.ones(7, jnp.float32)})
  new_state = nearest_state({'w': new.astype(jnp.float32)})
  old, new = {'w': old}, {'w': new}
  got = scalars(measure(old, state, new, new_state, start_params=old))
  assert got['nan_count'] == 1
  assert got['overflow_count'] == 4
  assert got['noise_ratio'] == 0
  # From 1 to 2, to +-65504 and, for BF16, to +-3.4e38: whole grid steps.
  assert got['least_changed_fraction'] == pytest.approx(3 / 7, rel=1e-6)
  if dtype == FP16:  # squares of the largest BF16 overflow
    assert got['displacement_slope'] == 1


def test_replaced_weights_are_counted_as_foreign():
  shadow = {'w': jnp.full(5, 1 + ULP / 4, jnp.float32)}
  # Neighbours of the shadow: 1 and 1 + ulp; three weights are neither.
  old = {'w': jnp.array([1, 1 + ULP, 1 + 2 * ULP, 0, -1], BF16)}
  state = nearest_state(shadow)
  assert measure(old, state, old, state)['foreign_count'] == 3


def adamw_step(link):
  tx = sr_optax.chain(optax.adamw(1e-4), link)

  @jax.jit
  def step(params, state, grads, start):
    updates, new_state = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    metrics = sr_optax.sticking_metrics(
      params, state, new, new_state, start_params=start
    )
    return new, new_state, metrics

  return tx, step


SR = [
  dict(shadow=shadow, refresh_every=refresh)
  for shadow in ('float32', 'residual16')
  for refresh in (1, math.inf)
]
LINKS = {
  **{str(o): sr_optax.stochastic_rounding(jax.random.key(0), **o) for o in SR},
  'no shadow': sr_optax.stochastic_rounding(jax.random.key(0), shadow=None),
  'fp16': sr_optax.stochastic_rounding(jax.random.key(0), dtype=FP16),
  'nearest': sr_optax.nearest_rounding(),
  'nearest, no shadow': sr_optax.nearest_rounding(shadow=None),
}


@pytest.mark.parametrize('name', LINKS)
def test_every_shadow_mode_agrees_with_numpy(name):
  dtype = FP16 if name == 'fp16' else BF16
  tx, step = adamw_step(LINKS[name])
  rng = np.random.default_rng(0)
  start = {
    'a': jnp.array(rng.normal(0, 1, (5, 7, 11)), dtype),
    'b': {'c': jnp.array(rng.normal(0, 0.02, 13), dtype)},
    'fp32': jnp.ones(3, jnp.float32),
  }
  params, state = start, tx.init(start)
  for _ in range(3):
    old, old_state = params, state
    grads = jax.tree.map(lambda p: jnp.ones_like(p) + p, params)
    params, state, metrics = step(params, state, grads, start)
  assert set(metrics['leaves']) == {'a', 'b/c'}

  def flat(tree, keys=('a', 'b')):
    leaves = [jax.tree.leaves(tree[k])[0] for k in keys]
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in leaves]

  views = [old, params, start] + [
    sr_optax.shadow_params(s, p) for s, p in ((old_state, old), (state, params))
  ]
  views = [flat(view) for view in views]
  cases = {
    'a': [view[0] for view in views],
    'b/c': [view[1] for view in views],
    None: [np.concatenate([x.ravel() for x in view]) for view in views],
  }
  for path, (v0, v1, first, s0, s1) in cases.items():
    got = scalars(metrics['leaves'][path] if path else metrics)
    ds, dv = s1 - s0, v1 - v0
    limits = jnp.finfo(dtype)
    power = np.maximum(2 ** np.floor(np.log2(np.abs(s0))), float(limits.tiny))
    moved = np.abs(ds) / (power * 2.0**-limits.nmant)  # in grid steps
    expected = {
      'changed_fraction': (dv != 0).mean(),
      'stuck_fraction': ((ds != 0) & (dv == 0)).mean(),
      'least_changed_fraction': np.minimum(moved, 1).mean(),
      'foreign_count': 0,
      'noise_ratio': np.linalg.norm(dv - ds) / np.linalg.norm(ds),
      'nan_count': 0,
      'overflow_count': 0,
    }
    x, y = s1 - first, v1 - first
    expected['displacement_slope'] = (x * y).sum() / (x * x).sum()
    # Sums of up to 398 float32 terms.
    assert got == pytest.approx(expected, rel=1e-4, nan_ok=True)


def test_without_a_shadow_nothing_counts_as_stuck():
  tx, step = adamw_step(LINKS['nearest, no shadow'])
  params = {'w': jnp.ones(17, BF16)}
  _, _, metrics = step(params, tx.init(params), params, params)
  got = scalars(metrics)
  assert got['stuck_fraction'] == got['changed_fraction'] == 0
  assert math.isnan(got['displacement_slope'])


def test_nearest_sticks_where_stochastic_rounding_does_not():
  params = {'w': jnp.ones(10_007, BF16)}
  slopes = {}
  for name in ('nearest', str(SR[0]), str(SR[1])):
    tx, step = adamw_step(LINKS[name])
    p, state = params, tx.init(params)
    for _ in range(8):  # 8 steps of 1e-4: a fifth of the step below 1, 2^-8
      p, state, metrics = step(p, state, params, params)
    slopes[name] = scalars(metrics)
  assert slopes['nearest']['stuck_fraction'] == 1
  assert slopes['nearest']['displacement_slope'] == 0
  # One weight shows 2^-8 with probability f = 8e-4 * 256 of it, so the slope
  # has standard deviation sqrt((1 - f) / (f n)).
  f = 8e-4 * 256
  for name in (str(SR[0]), str(SR[1])):
    slope = slopes[name]['displacement_slope']
    assert abs(slope - 1) < 5 * math.sqrt((1 - f) / (f * 10_007)) + 0.01


def test_leaves_that_no_link_rounds_are_left_out():
  tx = optax.multi_transform(
    {
      'train': sr_optax.chain(optax.sgd(1e-3), sr_optax.nearest_rounding()),
      'freeze': optax.set_to_zero(),
    },
    {'w': 'train', 'frozen': 'freeze'},
  )
  params = {'w': jnp.ones(3, BF16), 'frozen': jnp.ones(5, BF16)}
  state = tx.init(params)
  updates, new_state = jax.jit(tx.update)(params, state, params)
  new = optax.apply_updates(params, updates)
  metrics = measure(params, state, new, new_state)
  assert set(metrics['leaves']) == {'w'}
  assert float(metrics['stuck_fraction']) == 1


def test_nnx_states_are_measured_by_path():
  nnx = pytest.importorskip('flax.nnx')
  model = nnx.Linear(3, 5, param_dtype=BF16, rngs=nnx.Rngs(0))
  tx = sr_optax.chain(optax.sgd(1e-6), sr_optax.nearest_rounding())
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))

  @nnx.jit
  def step(model, optimizer, grads):
    old = nnx.as_pure(nnx.state((model, optimizer)))
    old_params, old_state = old[0], old[1]['opt_state']
    optimizer.update(model, grads)
    return sr_optax.sticking_metrics(
      old_params,
      old_state,
      nnx.state(model, nnx.Param),
      nnx.state(optimizer)['opt_state'],
    )

  metrics = step(model, optimizer, grads)
  assert set(metrics['leaves']) == {'kernel', 'bias'}
  assert metrics['leaves']['kernel']['stuck_fraction'] > 0.9


def test_counts_stay_exact_beyond_2_to_the_24():
  n = 2**24 + 2**12
  old = {'w': jnp.ones(n, BF16)}
  # NaN but for one: adding ones in float32 would stop at 2^24.
  new = {'w': jnp.full(n, jnp.nan, BF16).at[0].set(2)}
  state = nearest_state({'w': jnp.ones(n, jnp.float32)})
  metrics = measure(old, state, new, state)
  # 2^24 + 2^12 - 1 is no float32: halfway, to even.
  assert float(metrics['nan_count']) == np.float32(n - 1) == 2**24 + 2**12
  metrics = measure(old, state, {'w': new['w'].at[2:5].set(2)}, state)
  assert float(metrics['nan_count']) == n - 4


def test_one_reduction_reads_each_leaf():
  n = 2**20
  params = {'w': jnp.ones((256, n // 256), BF16)}
  state = nearest_state({'w': jnp.ones((256, n // 256), jnp.float32)})
  compiled = measure.lower(params, state, params, state).compile()
  # Two shadows of 4 bytes and two weights of 2, read once.
  assert compiled.cost_analysis()['bytes accessed'] < 12.5 * n
  assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * n


def test_the_same_on_eight_devices():
  mesh = jax.make_mesh((8,), ('x',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
  rng = np.random.default_rng(1)
  s0, s1 = rng.normal(1, 0.1, (2, 16, 5)).astype(np.float32)
  trees = [
    {'w': jnp.array(s0, BF16)},
    nearest_state({'w': jnp.array(s0)}),
    {'w': jnp.array(s1, BF16)},
    nearest_state({'w': jnp.array(s1)}),
  ]
  one = scalars(measure(*trees))
  spread = [
    jax.tree.map(lambda x: jax.device_put(x, sharding) if x.ndim else x, tree)
    for tree in trees
  ]
  eight = scalars(measure(*spread))
  assert eight == pytest.approx(one, rel=1e-5)


def test_foreign_states_and_trees_are_refused():
  params = {'w': jnp.ones(3, BF16)}
  state = sr_optax.nearest_rounding().init(params)
  with pytest.raises(ValueError, match='no rounding link'):
    sr_optax.sticking_metrics(params, optax.sgd(1).init(params), params, state)
  with pytest.raises(ValueError, match='start_params and old_params differ'):
    sr_optax.sticking_metrics(params, state, params, state, start_params={})
