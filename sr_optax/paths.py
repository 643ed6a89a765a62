"""Leaf paths: the names by which trees of different types are matched."""

import collections

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def flatten(
  tree,
) -> tuple[list[tuple[str, jax.Array]], jax.tree_util.PyTreeDef]:
  """Flattens a tree into ([(path, leaf)], treedef).

  A path is the leaf's names joined by '/', from dict, attribute and sequence
  keys alike; a trailing attribute `value` or `raw_value` (an NNX variable) is
  dropped. A bare array has the empty path. Python scalars become arrays.

  Raises:
    ValueError: if two leaves have the same path and could not be told apart,
      as in {'a/b': x, 'a': {'b': y}}.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  named = [
    (name(path), leaf if hasattr(leaf, 'dtype') else jnp.asarray(leaf))
    for path, leaf in leaves
  ]
  counts = collections.Counter(path for path, _ in named)
  if twice := [path for path, count in counts.items() if count > 1]:
    raise ValueError(f'several leaves have the path {twice[0]!r}; rename one')
  return named, treedef


def name(path: tuple) -> str:
  """The name of one JAX key path."""
  if path and isinstance(path[-1], GetAttrKey):
    if path[-1].name in ('value', 'raw_value'):
      path = path[:-1]
  return '/'.join(_entry(entry) for entry in path)


def _entry(entry) -> str:
  match entry:
    case DictKey(key=part) | FlattenedIndexKey(key=part):
      return str(part)
    case GetAttrKey(name=part):
      return part
    case SequenceKey(idx=part):
      return str(part)
  return str(entry)


def replace(tree, values: dict[str, object]):
  """The tree with the leaf at each path replaced, whatever its tree type."""
  named, treedef = flatten(tree)
  return treedef.unflatten([values[path] for path, _ in named])
