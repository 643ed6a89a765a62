"""Leaf paths: the names by which trees of different types are matched."""

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
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  return [
    (name(path), leaf if hasattr(leaf, 'dtype') else jnp.asarray(leaf))
    for path, leaf in leaves
  ], treedef


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
