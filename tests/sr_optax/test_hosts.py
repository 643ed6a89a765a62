"""Each host of the table in the documentation, run for a few steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import sr_optax

BF16 = jnp.bfloat16
INF = float('inf')
shadow_params = jax.jit(sr_optax.shadow_params)


def code(q):
  return np.asarray(q).view(np.uint16)


def link(seed=0, **kwargs):
  return sr_optax.stochastic_rounding(jax.random.key(seed), **kwargs)


def weights():
  rng = np.random.default_rng(0)
  return {
    'dense': {'kernel': jnp.asarray(rng.standard_normal((13, 7)) * 0.1, BF16)},
    'out': [jnp.asarray(rng.standard_normal((7, 5)) * 0.1, BF16)],
    'norm': jnp.ones((7,), jnp.float32),
  }


def gradients(seed=1):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), weights()
  )


def step_of(tx):
  @jax.jit
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def assert_visible(params, state):
  """Weights are the rounding of their shadow with the key of the state."""
  (found,) = [
    s
    for s in jax.tree.leaves(
      state, is_leaf=lambda s: isinstance(s, sr_optax.StochasticRoundingState)
    )
    if isinstance(s, sr_optax.StochasticRoundingState)
  ]
  shadow = shadow_params(state, params)
  q = jax.jit(sr_optax.stochastic_round_tree)(found.last_key, shadow)
  for name in ('dense', 'out'):
    for a, b in zip(
      jax.tree.leaves(q[name]), jax.tree.leaves(params[name]), strict=True
    ):
      np.testing.assert_array_equal(code(a), code(b))
  return found


INNER = {
  'adamw': optax.adamw(1e-3),
  'lion': optax.lion(1e-3),
  'sgd with momentum': optax.sgd(1e-3, momentum=0.9, nesterov=True),
  'adafactor': optax.adafactor(1e-3, min_dim_size_to_factor=4),
  'muon': contrib.muon(1e-3),
  'schedule_free': contrib.schedule_free_adamw(1e-3),
  'inject_hyperparams': optax.inject_hyperparams(optax.adamw)(1e-3),
  'plain chain': optax.chain(optax.clip(1.0), optax.adam(1e-3)),
  'masked': optax.masked(
    optax.adamw(1e-3), {'dense': True, 'out': [True], 'norm': True}
  ),
  'partition': optax.partition(
    {'a': optax.adamw(1e-3), 'b': optax.sgd(1e-3)},
    {'dense': 'a', 'out': 'b', 'norm': 'b'},
  ),
}


@pytest.mark.parametrize('name', list(INNER))
def test_inner_transforms_keep_their_state_types_and_move_the_shadow(name):
  tx = sr_optax.chain(INNER[name], link())
  params = weights()
  state = tx.init(params)
  types = jax.tree.map(lambda x: (x.shape, x.dtype), state)
  step = step_of(tx)
  for i in range(3):
    params, state = step(params, state, gradients(i))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == types
    found = assert_visible(params, state)
  assert int(found.count) == 3
  start = weights()
  moved = np.asarray(found.shadow['dense']['kernel']) != np.asarray(
    start['dense']['kernel'], np.float32
  )
  assert moved.mean() > 0.9
  assert params['norm'].dtype == jnp.float32
  assert (np.asarray(params['norm']) != 1).all()


def test_inject_hyperparams_inside_keeps_the_learning_rate_in_fp32():
  tx = sr_optax.chain(optax.inject_hyperparams(optax.sgd)(1e-3), link())
  state = tx.init(weights())
  rate = state[0].hyperparams['learning_rate']
  assert rate.dtype == jnp.float32 and rate == np.float32(1e-3)
  params, state = step_of(tx)(weights(), state, gradients())
  state[0].hyperparams['learning_rate'] = jnp.float32(0)
  before = shadow_params(state, params)
  params, state = step_of(tx)(params, state, gradients())
  jax.tree.map(
    np.testing.assert_array_equal, before, shadow_params(state, params)
  )


def test_a_plain_optax_chain_works_too():
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), link())
  params = weights()
  state, step = tx.init(params), step_of(tx)
  for i in range(3):
    params, state = step(params, state, gradients(i))
    assert_visible(params, state)


def test_the_link_works_under_masked_and_partition():
  # Freezing: partition with set_to_zero; the frozen leaf keeps its bits.
  labels = {'dense': 'train', 'out': 'freeze', 'norm': 'freeze'}
  tx = optax.partition(
    {
      'train': sr_optax.chain(optax.adamw(1e-3), link()),
      'freeze': optax.set_to_zero(),
    },
    labels,
  )
  params = weights()
  state, step = tx.init(params), step_of(tx)
  for i in range(3):
    params, state = step(params, state, gradients(i))
  np.testing.assert_array_equal(
    code(params['out'][0]), code(weights()['out'][0])
  )
  np.testing.assert_array_equal(params['norm'], 1)
  shadow = shadow_params(state, params)
  assert shadow['out'][0].dtype == jnp.float32
  moved = np.asarray(shadow['dense']['kernel']) - np.asarray(
    weights()['dense']['kernel'], np.float32
  )
  # Adam's first steps are of the size of the learning rate.
  assert 1e-4 < np.abs(moved).mean() < 3e-3


def test_noise_under_partition_follows_the_path_in_the_whole_tree():
  labels = {'dense': 'a', 'out': 'b', 'norm': 'b'}
  whole = link(3)
  split = optax.partition({'a': link(3), 'b': optax.set_to_zero()}, labels)
  u = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3), weights())
  a, _ = step_of(whole)(weights(), whole.init(weights()), u)
  b, _ = step_of(split)(weights(), split.init(weights()), u)
  np.testing.assert_array_equal(
    code(a['dense']['kernel']), code(b['dense']['kernel'])
  )


def snapshot(params, state):
  states = [
    s
    for s in jax.tree.leaves(
      state, is_leaf=lambda s: isinstance(s, sr_optax.StochasticRoundingState)
    )
    if isinstance(s, sr_optax.StochasticRoundingState)
  ]
  # As bytes: bit for bit.
  return [np.asarray(x).tobytes() for x in jax.tree.leaves((params, states))]


@pytest.mark.parametrize('shadow', ['float32', 'residual16', None])
def test_a_step_skipped_by_apply_if_finite_changes_nothing(shadow):
  tx = optax.chain(
    sr_optax.upcast(),
    optax.apply_if_finite(
      sr_optax.chain(optax.adamw(1e-3), link(shadow=shadow)), 5
    ),
  )
  params = weights()
  state, step = tx.init(params), step_of(tx)
  params, state = step(params, state, gradients(0))
  before = snapshot(params, state)
  bad = gradients(1)
  bad['dense']['kernel'] = bad['dense']['kernel'].at[2, 3].set(jnp.nan)
  params, state = step(params, state, bad)
  assert snapshot(params, state) == before
  params, state = step(params, state, gradients(2))
  assert snapshot(params, state) != before


@pytest.mark.parametrize('shadow', ['float32', 'residual16', None])
def test_multi_steps_changes_nothing_until_the_last_micro_step(shadow):
  inner = sr_optax.chain(optax.adamw(1e-3), link(shadow=shadow))
  tx = optax.chain(
    sr_optax.upcast(), optax.MultiSteps(inner, 3).gradient_transformation()
  )
  params = weights()
  state, step = tx.init(params), step_of(tx)
  for _ in range(2):
    before = snapshot(params, state)
    for i in range(2):
      params, state = step(params, state, gradients(i))
      assert snapshot(params, state) == before
    params, state = step(params, state, gradients(2))
    assert snapshot(params, state) != before


def test_multi_steps_accumulates_in_fp32():
  # The mean of 1 and 2^-9 is exact in FP32 and needs 10 bits: BF16 loses it.
  inner = sr_optax.chain(optax.sgd(1.0), link())
  tx = optax.chain(
    sr_optax.upcast(), optax.MultiSteps(inner, 2).gradient_transformation()
  )
  params = jnp.zeros((5,), BF16)
  state, step = tx.init(params), step_of(tx)
  for g in (1.0, 2.0**-9):
    params, state = step(params, state, jnp.full((5,), g, BF16))
  np.testing.assert_array_equal(
    shadow_params(state, params), np.full(5, -(1 + 2.0**-9) / 2)
  )


def test_training_inside_a_scan_is_training_in_a_loop():
  # The link is fed with equal updates, so bit for bit.
  tx = link(4)
  us = jnp.asarray(
    np.random.default_rng(5).standard_normal((7, 101)) * 1e-3, jnp.float32
  )
  params = jnp.ones((101,), BF16)
  state, step = tx.init(params), step_of(tx)
  a = params
  for u in us:
    a, state = step(a, state, u)

  @jax.jit
  def scan(params):
    def body(carry, u):
      params, state = carry
      updates, state = tx.update(u, state, params)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(body, (params, tx.init(params)), us)[0]

  b, scanned = scan(params)
  np.testing.assert_array_equal(code(a), code(b))
  jax.tree.map(np.testing.assert_array_equal, state, scanned)


def test_an_ensemble_under_vmap_is_the_members_alone():
  tx = link(6)
  params = jnp.asarray(np.random.default_rng(7).standard_normal((3, 101)), BF16)
  u = jnp.full((3, 101), 1e-3)
  keys = jax.vmap(lambda i: jax.random.key_data(jax.random.key(i)))(
    jnp.arange(3)
  )
  states = jax.vmap(tx.init)(params)._replace(key=keys)
  together, _ = jax.jit(jax.vmap(step_of(tx)))(params, states, u)
  for i in range(3):
    state = tx.init(params[i])._replace(key=keys[i])
    alone, _ = step_of(tx)(params[i], state, u[i])
    np.testing.assert_array_equal(code(together)[i], code(alone))


def test_an_nnx_optimizer_trains_under_nnx_jit():
  nnx = pytest.importorskip('flax.nnx')
  model = nnx.Linear(
    5, 3, rngs=nnx.Rngs(0), param_dtype=BF16, dtype=jnp.float32
  )
  start = {
    k: np.asarray(v) for k, v in nnx.to_pure_dict(nnx.state(model)).items()
  }
  tx = sr_optax.chain(optax.adamw(1e-3), link(8, shadow='residual16'))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, x):
    grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)

  for i in range(3):
    step(model, optimizer, jnp.full((2, 5), 1.0 + i))
  params = nnx.state(model, nnx.Param)
  assert nnx.to_pure_dict(params)['kernel'].dtype == BF16
  for opt_state in (optimizer.opt_state, nnx.state(optimizer)):
    shadow = sr_optax.shadow_params(opt_state, params)
    moved = np.abs(
      nnx.to_pure_dict(shadow)['kernel'] - start['kernel'].astype(np.float32)
    )
    assert 1e-4 < moved.mean() < 4e-3
  # On the pure dict: equal paths, equal noise.
  last_key = jax.tree.leaves(nnx.state(optimizer)['opt_state'][1]['last_key'])
  q = sr_optax.stochastic_round_tree(last_key[0], nnx.to_pure_dict(shadow))
  as_dict = nnx.to_pure_dict(params)
  np.testing.assert_array_equal(code(q['kernel']), code(as_dict['kernel']))


@pytest.mark.parametrize('stored', ['float32', 'residual16', None])
def test_an_nnx_state_can_be_resynced(stored):
  nnx = pytest.importorskip('flax.nnx')
  model = nnx.Linear(5, 3, rngs=nnx.Rngs(0), param_dtype=BF16)
  tx = sr_optax.chain(optax.sgd(1e-3), link(9, shadow=stored))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  new = jax.tree.map(lambda x: x * 0 + 3, nnx.state(model, nnx.Param))
  nnx.update(model, new)
  state = sr_optax.resync(nnx.state(optimizer), new)
  nnx.update(optimizer, state)
  shadow = sr_optax.shadow_params(optimizer.opt_state, new)
  np.testing.assert_array_equal(
    nnx.to_pure_dict(shadow)['kernel'], np.full((5, 3), 3.0, np.float32)
  )


def test_a_train_state_trains():
  train_state = pytest.importorskip('flax.training.train_state')
  tx = sr_optax.chain(optax.adamw(1e-3), link(10))
  host = train_state.TrainState.create(apply_fn=None, params=weights(), tx=tx)
  step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
  for i in range(3):
    host = step(host, gradients(i))
    assert_visible(host.params, host.opt_state)
  # The same as by hand, except for what fusion does to the inner optimizer.
  assert int(host.step) == int(host.opt_state[-1].count) == 3


def test_orbax_saves_and_restores_also_into_another_sharding(tmp_path):
  ocp = pytest.importorskip('orbax.checkpoint')
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  def mesh(shape):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(shape, ('x', 'y'), kinds, devices=jax.devices('cpu'))

  def place(tree, mesh):
    def one(x):
      spec = P('x', 'y') if x.ndim == 2 else P()
      return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(one, tree)

  tx = sr_optax.chain(
    optax.adamw(1e-3), link(11, shadow='residual16', refresh_every=3)
  )
  rng = np.random.default_rng(12)
  params = place(
    {'w': jnp.asarray(rng.standard_normal((16, 8)), BF16)}, mesh((8, 1))
  )
  state, step = tx.init(params), step_of(tx)
  grads = jax.tree.map(lambda p: p * BF16(0.1), params)
  params, state = step(params, state, grads)
  with ocp.StandardCheckpointer() as saver:
    saver.save(tmp_path / 'here', (params, state))
  target = jax.eval_shape(lambda: (params, state))
  small = mesh((2, 4))
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape,
      x.dtype,
      sharding=NamedSharding(small, P('x', 'y') if x.ndim == 2 else P()),
    ),
    target,
  )
  with ocp.StandardCheckpointer() as loader:
    restored = loader.restore(tmp_path / 'here', target)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
    restored,
    (params, state),
  )
  assert restored[0]['w'].sharding.mesh.shape == {'x': 2, 'y': 4}
  np.testing.assert_array_equal(
    shadow_params(restored[1], restored[0])['w'],
    shadow_params(state, params)['w'],
  )
  # Training goes on from there, with a link of another key.
  other = sr_optax.chain(
    optax.adamw(1e-3), link(99, shadow='residual16', refresh_every=3)
  )
  new, after = step_of(other)(*restored, place(grads, small))
  want = sr_optax.stochastic_round_tree(
    after[-1].last_key, sr_optax.shadow_params(after, new)
  )
  np.testing.assert_array_equal(code(new['w']), code(want['w']))
  np.testing.assert_array_equal(after[-1].key, state[-1].key)
