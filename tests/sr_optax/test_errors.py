"""Bad input: typed errors that say what was expected and what was got."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sr_optax

BF16, FP16, INF = jnp.bfloat16, jnp.float16, float('inf')
KEY = np.array([0, 1], np.uint32)


def sr(**kwargs):
  return sr_optax.stochastic_rounding(KEY, **kwargs)


def says(error, *words):
  """An error of exactly this type whose text has the words in this order."""
  return pytest.raises(error, match='(?s)' + '.*'.join(map(re.escape, words)))


@pytest.mark.parametrize(
  'dtype', [jnp.float32, jnp.float8_e4m3fn, jnp.int16, 'nonsense', None]
)
def test_an_unsupported_target(dtype):
  for call in (
    lambda: sr(dtype=dtype),
    lambda: sr_optax.nearest_rounding(dtype=dtype),
    lambda: sr_optax.stochastic_round(KEY, jnp.ones(3), dtype),
    lambda: sr_optax.stochastic_round_tree(KEY, {}, dtype),
    lambda: sr_optax.round_with_bits(jnp.ones(3), jnp.ones(3, 'u2'), dtype),
  ):
    with says(ValueError, 'unsupported target', 'expected bfloat16 or float16'):
      call()


@pytest.mark.parametrize('refresh', [0, -1, 1.5, -INF, float('nan'), '2', None])
def test_refresh_every_that_is_no_number_of_steps(refresh):
  with says(ValueError, 'refresh_every', 'expected', 'got', repr(refresh)):
    sr(refresh_every=refresh)


@pytest.mark.parametrize('refresh', [True, False])
def test_refresh_every_that_is_a_bool(refresh):
  with says(ValueError, 'refresh_every', 'expected', 'got', repr(refresh)):
    sr(refresh_every=refresh)


@pytest.mark.parametrize('refresh', [2, INF])
def test_refresh_every_without_a_shadow(refresh):
  with says(ValueError, 'shadow=None needs refresh_every=1', str(refresh)):
    sr(shadow=None, refresh_every=refresh)


def test_whole_numbers_of_any_type_are_accepted():
  for refresh in (1, np.int32(3), np.uint8(7), 10**12, INF):
    sr(refresh_every=refresh)


def test_residual16_with_float16_or_with_nearest_rounding():
  with says(ValueError, 'residual16', 'bfloat16', 'got float16'):
    sr(shadow='residual16', dtype=FP16)
  with says(ValueError, 'shadow', "got 'residual16'"):
    sr_optax.nearest_rounding(shadow='residual16')
  with says(ValueError, 'shadow', 'expected', "got 'bfloat16'"):
    sr(shadow='bfloat16')


def test_a_key_that_is_none():
  with says(TypeError, 'typed key', 'got int'):
    sr_optax.stochastic_rounding(0)
  with says(TypeError, 'typed key', 'got an array of int32'):
    sr_optax.stochastic_rounding(jnp.array([0, 1]))
  with says(TypeError, 'typed key', 'got an array of float32'):
    sr_optax.stochastic_round(jnp.ones(2), jnp.ones(3))


def test_a_key_of_the_wrong_shape():
  with says(ValueError, 'one typed key', 'shape (3,)'):
    sr_optax.stochastic_rounding(np.zeros(3, np.uint32))
  with says(ValueError, 'one typed key', 'shape (2,)'):
    sr_optax.stochastic_rounding(jax.random.split(jax.random.key(0)))
  with says(ValueError, 'one typed key', 'shape (1, 2)'):
    sr_optax.stochastic_round_tree(np.zeros((1, 2), np.uint32), {})
  params = jnp.ones(3, BF16)
  tx = sr()
  with says(ValueError, 'one typed key', 'shape (3,)'):
    tx.update(jnp.ones(3), tx.init(params), params, key=np.zeros(3, np.uint32))


@pytest.mark.parametrize('chained', [True, False])
def test_missing_params(chained):
  tx = sr_optax.chain(optax.sgd(1.0), sr()) if chained else sr()
  params = jnp.ones(3, BF16)
  with says(ValueError, 'expected params', 'update(updates, state, params)'):
    tx.update(jnp.ones(3), tx.init(params))


def test_a_key_for_one_call_with_shared_noise():
  tx = sr(refresh_every=3)
  params = jnp.ones(3, BF16)
  with says(ValueError, 'key', 'refresh_every=1', 'refresh_every=3'):
    tx.update(jnp.ones(3), tx.init(params), params, key=KEY)


def test_trees_of_different_structure():
  a, b = {'a': jnp.ones(3, BF16)}, {'b': jnp.ones(3, BF16)}
  tx = sr()
  with says(ValueError, 'updates and params differ', "lack ['a']", "['b']"):
    tx.update(b, tx.init(a), a)
  with says(ValueError, 'shadow and params differ', "lack ['b']", "['a']"):
    tx.update(b, tx.init(a), b)
  with says(ValueError, 'updates and params differ', "['a']"):
    sr_optax.apply_updates(a, {}, tx.init(a))


@pytest.mark.parametrize('shadow', ['float32', 'residual16', None])
def test_an_update_of_another_shape(shadow):
  params = {'w': jnp.ones((3, 5), BF16)}
  tx = sr(shadow=shadow)
  for shape in ((5, 3), (5,), (1, 5), ()):
    with says(ValueError, "'w'", 'expected shape (3, 5)', f'got {shape}'):
      jax.jit(tx.update)({'w': jnp.ones(shape)}, tx.init(params), params)


@pytest.mark.parametrize('shadow', ['float32', 'residual16'])
def test_parameters_of_another_shape_than_their_shadow(shadow):
  tx = sr(shadow=shadow)
  state = tx.init({'w': jnp.ones((3, 5), BF16)})
  other = {'w': jnp.ones((5, 3), BF16)}
  for call in (
    lambda: tx.update({'w': jnp.ones((5, 3))}, state, other),
    lambda: sr_optax.shadow_params(state, other),
    lambda: sr_optax.resync(state, other),
  ):
    with says(ValueError, "'w'", '(3, 5)', 'got (5, 3)'):
      call()


def test_parameters_that_resync_does_not_find():
  state = sr().init({'w': jnp.ones(3, BF16)})
  with says(ValueError, "'w'", 'expected (3,)', 'no such leaf'):
    sr_optax.resync(state, {'v': jnp.ones(3, BF16)})


@pytest.mark.parametrize('other', [FP16, jnp.float8_e5m2])
def test_parameters_of_another_small_type(other):
  params = {'a': {'w': jnp.ones(3, other)}, 'b': jnp.ones(3, BF16)}
  name = jnp.dtype(other).name
  for tx in (sr(), sr_optax.nearest_rounding(), sr_optax.chain(sr())):
    with says(TypeError, "'a/w'", 'expected bfloat16', f'got {name}'):
      tx.init(params)
  with says(TypeError, "'b'", 'expected float16', 'got bfloat16'):
    sr(dtype=FP16).init({'b': jnp.ones(3, BF16)})
  with says(TypeError, "'a/w'", 'expected float32', f'got {name}'):
    sr_optax.stochastic_round_tree(KEY, params)


def test_trees_with_floats_but_none_in_the_target_type():
  params = {'w': jnp.ones(3, jnp.float32), 'n': jnp.ones(3, jnp.int32)}
  for tx in (sr(), sr_optax.nearest_rounding(), sr_optax.chain(sr())):
    with says(ValueError, 'no parameter is bfloat16', 'cast', "['float32']"):
      tx.init(params)


def test_trees_without_any_float_are_fine():
  sr().init({'n': jnp.ones(3, jnp.int32)})
  masked = optax.masked(sr(), {'w': False})
  masked.init({'w': jnp.ones(3, jnp.float32)})


def test_a_chain_that_does_not_end_in_a_link():
  for transforms in (
    (),
    (optax.sgd(1.0),),
    (sr(), optax.sgd(1.0)),
    (optax.sgd(1.0), optax.masked(sr(), True)),
    (sr_optax.chain(sr()),),
    (None,),
  ):
    with says(TypeError, 'chain: the last transform must be', 'got'):
      sr_optax.chain(*transforms)


@pytest.mark.parametrize(
  'state', [(), {}, None, optax.ScaleByAdamState(0, (), ())]
)
def test_a_state_without_a_link(state):
  params = {'w': jnp.ones(3, BF16)}
  for call in (
    lambda: sr_optax.shadow_params(state, params),
    lambda: sr_optax.resync(state, params),
    lambda: sr_optax.apply_updates(params, params, state),
  ):
    with says(ValueError, 'holds no rounding link', 'expected', 'got'):
      call()
  with says(ValueError, 'holds no rounding link'):
    sr_optax.init_from_shadow(optax.sgd(1.0), {'w': jnp.ones(3)})


def test_values_and_bits_of_the_wrong_type():
  bits16, bits32 = np.zeros(3, np.uint16), np.zeros(3, np.uint32)
  for x in (jnp.ones(3, BF16), np.ones(3, np.float64), 'a', None):
    with says(TypeError, 'x: expected float32', 'got'):
      sr_optax.round_with_bits(x, bits16)
    with says(TypeError, 'x: expected float32', 'got'):
      sr_optax.stochastic_round(KEY, x)
  with says(TypeError, 'bits for bfloat16', 'expected uint16', 'got uint32'):
    sr_optax.round_with_bits(jnp.ones(3), bits32)
  with says(TypeError, 'bits for float16', 'expected uint32', 'got uint16'):
    sr_optax.round_with_bits(jnp.ones(3), bits16, FP16)
  with says(TypeError, 'bits', 'expected uint16', 'got int32'):
    sr_optax.round_with_bits(jnp.ones(3), jnp.zeros(3, jnp.int32))


def test_errors_come_while_tracing_and_not_while_running():
  params = jnp.ones(3, BF16)
  tx = sr()
  with says(ValueError, 'expected shape (3,)', 'got (5,)'):
    jax.eval_shape(tx.update, jnp.ones(5), tx.init(params), params)


def test_two_leaves_with_one_path():
  params = {'a/b': jnp.zeros(3, jnp.bfloat16)}
  params['a'] = {'b': jnp.ones(3, jnp.bfloat16)}
  with pytest.raises(ValueError, match="'a/b'"):
    sr_optax.nearest_rounding().init(params)


def test_a_gradient_that_would_broadcast_to_its_parameter():
  params = {'w': jnp.ones(3, jnp.bfloat16)}
  tx = sr_optax.chain(optax.adam(1e-3), sr_optax.nearest_rounding())
  state = tx.init(params)
  for shape in ((1,), (4,), ()):
    with pytest.raises(ValueError, match=r"'w'.*\(3,\)"):
      tx.update({'w': jnp.ones(shape)}, state, params)


def test_a_state_of_another_transform():
  params = {'w': jnp.ones(3, jnp.bfloat16)}
  stochastic = sr_optax.stochastic_rounding(jax.random.key(0))
  nearest = sr_optax.nearest_rounding()
  updates = {'w': jnp.ones(3)}
  for tx, state in (
    (stochastic, nearest.init(params)),
    (nearest, stochastic.init(params)),
    (stochastic, optax.adam(1e-3).init(params)),
  ):
    with pytest.raises(TypeError, match='expected .*RoundingState'):
      tx.update(updates, state, params)


def test_a_link_of_a_chain_that_is_no_transform():
  with pytest.raises(TypeError, match='NoneType'):
    sr_optax.chain(None, sr_optax.nearest_rounding())
