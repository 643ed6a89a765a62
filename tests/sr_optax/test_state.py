"""The state: self-describing, stable, readable and replaceable at any depth."""

import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sr_optax

BF16, FP16 = jnp.bfloat16, jnp.float16
INF = float('inf')
SHADOWS = ['float32', 'residual16', None]


shadow_params = jax.jit(sr_optax.shadow_params)
round_tree = jax.jit(sr_optax.stochastic_round_tree)
init_from_shadow = jax.jit(
  sr_optax.init_from_shadow, static_argnums=0, static_argnames='dtype'
)


def code(q):
  return np.asarray(q).view(np.uint16)


def words(x):
  return np.asarray(x).view(np.uint32)


def weights(seed=0, dtype=BF16):
  rng = np.random.default_rng(seed)
  return {
    'layers': [
      {'w': jnp.asarray(rng.standard_normal((11, 7)) * 0.02, dtype)},
      {'w': jnp.asarray(rng.standard_normal((7, 5)) * 0.02, dtype)},
    ],
    'norm': jnp.ones((3,), jnp.float32),
    'id': jnp.arange(2),
  }


def adamw(seed=0, **kwargs):
  return sr_optax.chain(
    optax.adamw(1e-3),
    sr_optax.stochastic_rounding(jax.random.key(seed), **kwargs),
  )


def random_updates(params, seed=1):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: (rng.standard_normal(p.shape) * 1e-3).astype(
      p.dtype if p.dtype == jnp.int32 else np.float32
    ),
    params,
  )


def trained(tx, params, steps=3):
  state = tx.init(params)
  step = jax.jit(tx.update)
  for i in range(steps):
    updates, state = step(random_updates(params, i), state, params)
    params = optax.apply_updates(params, updates)
  return params, state


@pytest.mark.parametrize('shadow', SHADOWS)
def test_state_types_are_the_stated_ones_and_never_change(shadow):
  params = weights()
  tx = sr_optax.stochastic_rounding(jax.random.key(0), shadow=shadow)
  state = tx.init(params)
  assert state._fields == ('count', 'key', 'last_key', 'shadow')
  assert state.count.dtype == jnp.int32 and state.count.shape == ()
  for k in (state.key, state.last_key):
    assert k.dtype == jnp.uint32 and k.shape == (2,)
  stored = {'float32': 'float32', 'residual16': 'uint16'}
  for x in jax.tree.leaves(state.shadow):
    assert x.dtype.name == stored[shadow]
  chained = sr_optax.chain(
    optax.adamw(1e-3),
    sr_optax.stochastic_rounding(jax.random.key(0), shadow=shadow),
  )
  for t in (tx, chained):
    if t is chained:
      del params['id']  # Adam's moments of integers are its own affair
    before = jax.eval_shape(t.init, params)
    _, after = jax.eval_shape(t.update, params, before, params)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.leaves(before) == jax.tree.leaves(after)


def test_a_state_of_nearest_rounding_has_no_key():
  state = sr_optax.nearest_rounding().init(weights())
  assert state._fields == ('count', 'shadow')
  assert sr_optax.nearest_rounding(shadow=None).init(weights()).shadow is None


def test_many_steps_compile_once():
  params, tx = weights(), adamw()
  del params['id']
  traces = []

  @jax.jit
  def step(params, state, grads):
    traces.append(1)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  for i in range(5):
    params, state = step(params, state, random_updates(params, i))
  assert len(traces) == 1


def test_the_link_is_found_at_any_depth():
  params = weights()
  link = sr_optax.stochastic_rounding(jax.random.key(2))
  every = {k: True for k in params}
  labels = jax.tree.map(lambda x: 'go' if x.dtype == BF16 else 'stop', params)
  hosts = {
    'alone': link,
    'chain': sr_optax.chain(optax.adam(1e-3), link),
    'plain chain': optax.chain(optax.clip(1.0), optax.chain(link)),
    'masked': optax.masked(link, every),
    'partition': optax.partition(
      {'go': link, 'stop': optax.set_to_zero()}, labels
    ),
    'MultiSteps': optax.MultiSteps(
      optax.chain(sr_optax.upcast(), link), 2
    ).gradient_transformation(),
    'apply_if_finite': optax.apply_if_finite(link, 3),
    'inject_hyperparams': sr_optax.chain(
      optax.inject_hyperparams(optax.sgd)(learning_rate=1e-3), link
    ),
  }
  for name, tx in hosts.items():
    state = tx.init(params)
    shadow = shadow_params(state, params)
    assert jax.tree.structure(shadow) == jax.tree.structure(params), name
    for p, s in zip(
      jax.tree.leaves(params), jax.tree.leaves(shadow), strict=True
    ):
      assert s.dtype == (jnp.float32 if p.dtype == BF16 else p.dtype)
      np.testing.assert_array_equal(np.asarray(p).astype(s.dtype), s)
    other = weights(3)
    again = sr_optax.resync(state, other)
    assert jax.tree.structure(again) == jax.tree.structure(state), name
    shadow = shadow_params(again, other)
    np.testing.assert_array_equal(
      shadow['layers'][0]['w'], np.asarray(other['layers'][0]['w'], 'f4')
    )


def test_leaves_are_matched_by_path_and_not_by_tree_type():
  class Layer(NamedTuple):
    w: jax.Array

  params, state = trained(adamw(), weights())
  want = shadow_params(state, params)
  view = {
    'layers': tuple(Layer(layer['w']) for layer in params['layers']),
    'norm': params['norm'],
    'id': params['id'],
  }
  got = shadow_params(state, view)
  assert isinstance(got['layers'][0], Layer)
  jax.tree.map(
    np.testing.assert_array_equal, jax.tree.leaves(want), jax.tree.leaves(got)
  )


def test_a_state_that_lost_its_type_is_still_read():
  # What a checkpoint restored without a target gives: nested dicts.
  params, state = trained(adamw(shadow='residual16'), weights())
  as_dicts = {'0': {}, '1': state[-1]._asdict()}
  jax.tree.map(
    np.testing.assert_array_equal,
    shadow_params(as_dicts, params),
    shadow_params(state, params),
  )
  again = sr_optax.resync(as_dicts, params)
  np.testing.assert_array_equal(
    shadow_params(again, params)['layers'][1]['w'],
    np.asarray(params['layers'][1]['w'], np.float32),
  )


@pytest.mark.parametrize(
  'shadow, refresh',
  [
    ('float32', 1),
    ('float32', INF),
    ('residual16', 1),
    ('residual16', INF),
    (None, 1),
  ],
)
def test_resync_adopts_any_replacement_bit_for_bit(shadow, refresh):
  # Every BF16 pattern: +-0, +-Inf, all NaN payloads, subnormals.
  tx = sr_optax.stochastic_rounding(
    jax.random.key(4), shadow=shadow, refresh_every=refresh
  )
  params = jnp.ones((2**16,), BF16)
  params, state = trained(tx, params)
  new = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(BF16))
  state = jax.jit(sr_optax.resync)(state, new)
  shadow_now = shadow_params(state, new)
  np.testing.assert_array_equal(
    words(shadow_now), np.arange(2**16, dtype=np.uint32) << 16
  )
  assert int(state.count) == 3


def test_resync_of_a_nearest_link_and_of_fp16():
  for tx, dtype in (
    (sr_optax.nearest_rounding(), BF16),
    (sr_optax.nearest_rounding(dtype=FP16), FP16),
    (sr_optax.stochastic_rounding(jax.random.key(5), dtype=FP16), FP16),
  ):
    _, state = trained(tx, jnp.ones((2**16,), dtype))
    new = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(dtype))
    shadow = shadow_params(sr_optax.resync(state, new), new)
    want = np.asarray(new).astype(np.float32)
    np.testing.assert_array_equal(shadow, want)


@pytest.mark.parametrize('shadow', ['float32', 'residual16'])
@pytest.mark.parametrize('chained', [True, False])
def test_init_from_shadow_starts_from_exactly_that_shadow(shadow, chained):
  rng = np.random.default_rng(6)
  tree = {
    'w': (rng.standard_normal((101, 7)) * 0.02).astype(np.float32),
    'id': np.arange(3, dtype=np.int32),
  }
  link = sr_optax.stochastic_rounding(jax.random.key(6), shadow=shadow)
  tx = sr_optax.chain(optax.adamw(1e-3), link) if chained else link
  params, state = init_from_shadow(tx, tree)
  assert params['w'].dtype == BF16 and params['id'].dtype == jnp.int32
  got = shadow_params(state, params)
  np.testing.assert_array_equal(words(got['w']), words(tree['w']))
  link_state = state[-1] if chained else state
  want = round_tree(link_state.last_key, tree)
  np.testing.assert_array_equal(code(params['w']), code(want['w']))
  assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
  assert int(link_state.count) == 0


def test_init_from_shadow_feeds_fp32_to_the_inner_transforms():
  # A transform that keeps its first parameters sees the shadow, unrounded.
  keep = optax.GradientTransformation(
    lambda params: (params,), lambda u, s, p=None: (u, s)
  )
  tree = {'w': np.full(5, 1 + 2.0**-20, np.float32)}
  tx = sr_optax.chain(keep, sr_optax.stochastic_rounding(jax.random.key(7)))
  _, state = init_from_shadow(tx, tree)
  np.testing.assert_array_equal(state[0][0]['w'], tree['w'])


def test_init_from_shadow_restructures_without_loss():
  # Move the shadow of a trained run to other names and another storage.
  params, state = trained(adamw(8), weights())
  shadow = shadow_params(state, params)
  flat = {f'block{i}': layer['w'] for i, layer in enumerate(shadow['layers'])}
  tx = adamw(9, shadow='residual16', refresh_every=INF)
  moved, state = init_from_shadow(tx, flat)
  again = shadow_params(state, moved)
  for i in range(2):
    np.testing.assert_array_equal(
      words(again[f'block{i}']), words(shadow['layers'][i]['w'])
    )


def test_init_from_shadow_knows_fp16_and_takes_a_dtype():
  tree = {'w': np.linspace(-1, 1, 101, dtype=np.float32)}
  tx = sr_optax.stochastic_rounding(jax.random.key(10), dtype=FP16)
  params, state = init_from_shadow(tx, tree)
  assert params['w'].dtype == FP16
  np.testing.assert_array_equal(shadow_params(state, params)['w'], tree['w'])
  hidden = optax.chain(optax.clip(1.0), tx)
  params, _ = init_from_shadow(hidden, tree, dtype=FP16)
  assert params['w'].dtype == FP16


def test_init_from_shadow_saturates_and_works_for_nearest_rounding():
  tree = {'w': np.array([3.4e38, -3.4e38, 1.001], np.float32)}
  params, state = init_from_shadow(sr_optax.nearest_rounding(), tree)
  np.testing.assert_array_equal(code(params['w']), [0x7F7F, 0xFF7F, 0x3F80])
  shadow = shadow_params(state, params)['w']
  np.testing.assert_array_equal(
    words(shadow), [0x7F7F0000, 0xFF7F0000, words(tree['w'])[2]]
  )


@pytest.mark.parametrize('shadow', SHADOWS)
def test_the_state_survives_pickle_and_numpy(shadow):
  tx = adamw(11, shadow=shadow)
  params, state = trained(tx, weights())
  leaves, treedef = jax.tree.flatten((params, state))
  assert {x.dtype.name for x in jax.tree.leaves(state)} <= {
    'float32', 'int32', 'uint32', 'uint16',
  }  # fmt: skip
  data = pickle.loads(pickle.dumps([np.asarray(x) for x in leaves]))
  params2, state2 = treedef.unflatten([jnp.asarray(x) for x in data])
  g = random_updates(params, 9)
  want = jax.jit(tx.update)(g, state, params)
  got = jax.jit(adamw(12, shadow=shadow).update)(g, state2, params2)
  jax.tree.map(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize('shadow', SHADOWS)
def test_buffers_can_be_donated_with_fp32_leaves_too(shadow):
  # Donation of both fails if any two arrays share a buffer.
  tx = adamw(13, shadow=shadow)
  params = weights()
  del params['id']
  state = tx.init(params)

  def step(params, state):
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(step, donate_argnums=(0, 1))
  for _ in range(3):
    params, state = step(params, state)
  assert int(state[-1].count) == 3
  # The transform keeps its own key: a second run can start.
  again = tx.init(weights())
  np.testing.assert_array_equal(
    again[-1].key, jax.random.key_data(jax.random.key(13))
  )


@pytest.mark.parametrize('shadow', ['float32', 'residual16'])
def test_the_shadow_never_aliases_what_it_was_made_from(shadow):
  tree = {'w': jnp.ones((5, 7), jnp.float32), 'n': jnp.ones((3,), jnp.float32)}
  tx = sr_optax.stochastic_rounding(jax.random.key(14), shadow=shadow)
  params, state = sr_optax.init_from_shadow(tx, tree)
  buffers = [
    x.unsafe_buffer_pointer() for x in jax.tree.leaves((tree, params, state))
  ]
  assert len(set(buffers)) == len(buffers)
  new = {'w': jnp.zeros((5, 7), BF16), 'n': params['n']}
  state = sr_optax.resync(state, new)
  buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((new, state))]
  assert len(set(buffers)) == len(buffers)


def test_two_inits_of_one_transform_share_no_buffer():
  key = jax.random.PRNGKey(15)
  tx = sr_optax.stochastic_rounding(key)
  a, b = tx.init(weights()), tx.init(weights())
  jax.tree.map(lambda x: x.delete(), a)
  assert int(b.key[1]) == 15 and int(key[1]) == 15


def test_shadow_params_of_a_run_without_a_shadow_are_the_weights():
  params, state = trained(adamw(16, shadow=None), weights())
  shadow = shadow_params(state, params)
  np.testing.assert_array_equal(
    shadow['layers'][0]['w'], np.asarray(params['layers'][0]['w'], np.float32)
  )


def test_weights_that_are_rounded_already_are_their_own_shadow():
  tx = sr_optax.chain(
    optax.sgd(1e-2), sr_optax.stochastic_rounding(jax.random.key(0))
  )
  start = {'w': jnp.full(5, 1 + 2**-10), 'v': jnp.ones(3, jnp.bfloat16)}
  params, state = sr_optax.init_from_shadow(tx, start)
  assert params['w'].dtype == params['v'].dtype == jnp.bfloat16
  adam = sr_optax.chain(optax.adam(1e-2), sr_optax.nearest_rounding())
  moments = sr_optax.init_from_shadow(adam, start)[1][0]
  assert {x.dtype.name for x in jax.tree.leaves(moments)} == {
    'float32',
    'int32',
  }
  shadow = sr_optax.shadow_params(state, params)
  np.testing.assert_array_equal(shadow['w'], start['w'])
  np.testing.assert_array_equal(shadow['v'], np.ones(3))
