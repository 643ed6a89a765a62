"""The path rule: noise follows a leaf's names, whatever tree holds it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sr_optax
from sr_optax import paths

round_tree = jax.jit(sr_optax.stochastic_round_tree)


class Pair(NamedTuple):
  kernel: jax.Array
  bias: jax.Array


def names(tree):
  return [path for path, _ in paths.flatten(tree)[0]]


def code(q):
  return np.asarray(q).view(np.uint16)


def test_names_join_dict_list_and_attribute_keys_by_slashes():
  x = jnp.zeros(3)
  tree = {'layers': [{'w': x}, Pair(x, x)], 'step': (x,)}
  assert names(tree) == [
    'layers/0/w',
    'layers/1/kernel',
    'layers/1/bias',
    'step/0',
  ]
  assert names({3: {'a': x}}) == ['3/a']
  assert names(x) == ['']


def test_a_dict_and_a_namedtuple_of_the_same_names_round_alike():
  key = jax.random.key(0)
  a, b = (
    jnp.asarray(np.random.default_rng(i).standard_normal(101), jnp.float32)
    for i in range(2)
  )
  as_tuple = round_tree(key, {'layer': Pair(a, b)})['layer']
  # Another order, a sibling more, another container.
  as_dict = round_tree(key, {'layer': {'x': a, 'bias': b, 'kernel': a}})
  np.testing.assert_array_equal(
    code(as_tuple.kernel), code(as_dict['layer']['kernel'])
  )
  np.testing.assert_array_equal(
    code(as_tuple.bias), code(as_dict['layer']['bias'])
  )
  as_list = round_tree(key, [a, b])
  as_strings = round_tree(key, {'0': a, '1': b})
  np.testing.assert_array_equal(code(as_list[1]), code(as_strings['1']))


def test_only_a_trailing_attribute_value_is_dropped():
  key = jax.tree_util
  attribute = (key.DictKey('w'), key.GetAttrKey('value'))
  raw = (key.DictKey('w'), key.GetAttrKey('raw_value'))
  entry = (key.DictKey('w'), key.DictKey('value'))
  inside = (key.GetAttrKey('value'), key.DictKey('w'))
  assert paths.name(attribute) == paths.name(raw) == 'w'
  assert paths.name(entry) == 'w/value'
  assert paths.name(inside) == 'value/w'


def test_all_views_of_an_nnx_model_round_alike():
  nnx = pytest.importorskip('flax.nnx')

  class Block(nnx.Module):
    def __init__(self, rngs):
      self.up = nnx.Linear(5, 7, rngs=rngs)
      self.layers = nnx.List([nnx.Linear(7, 3, rngs=rngs) for _ in range(2)])

  model = Block(nnx.Rngs(0))
  state = nnx.state(model, nnx.Param)
  pure = nnx.to_pure_dict(state)
  plain = {
    'up': {'kernel': pure['up']['kernel'], 'bias': pure['up']['bias']},
    'layers': [
      {'kernel': pure['layers'][i]['kernel'], 'bias': pure['layers'][i]['bias']}
      for i in range(2)
    ],
  }
  views = [state, pure, plain, nnx.split(model, nnx.Param, ...)[1], model]
  key = jax.random.key(1)
  want = {
    'up/kernel', 'up/bias', 'layers/0/kernel', 'layers/0/bias',
    'layers/1/kernel', 'layers/1/bias',
  }  # fmt: skip
  rounded = []
  for view in views:
    assert set(names(view)) == want
    q = sr_optax.stochastic_round_tree(key, view)
    rounded.append({n: code(x) for n, x in paths.flatten(q)[0]})
  for other in rounded[1:]:
    for name in want:
      np.testing.assert_array_equal(other[name], rounded[0][name])


def test_a_train_state_holds_the_same_names_as_its_parameters():
  train_state = pytest.importorskip('flax.training.train_state')
  optax = pytest.importorskip('optax')
  params = {'dense': {'kernel': jnp.linspace(-1, 1, 35, dtype=jnp.bfloat16)}}
  tx = sr_optax.chain(
    optax.sgd(1e-3), sr_optax.stochastic_rounding(jax.random.key(2))
  )
  host = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
  grads = jax.tree.map(jnp.ones_like, params)
  host = jax.jit(lambda s: s.apply_gradients(grads=grads))(host)
  shadow = sr_optax.shadow_params(host.opt_state, host.params)
  q = sr_optax.stochastic_round_tree(host.opt_state[-1].last_key, shadow)
  np.testing.assert_array_equal(
    code(q['dense']['kernel']), code(host.params['dense']['kernel'])
  )
