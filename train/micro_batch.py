"""Micro-batches: a batch worked off in parts that end at group borders.

Every leaf of a batch has its rows in front, prompts `[P, ...]` or completions
`[B, ...]` prompt-major. Cut into n equal parts, row i of the prompts and its
completions stay together.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from train.sharding import ROWS, constrain


def split(tree: Any, parts: int) -> Any:
  """Cuts the rows of every leaf: `[R, ...]` to `[parts, R / parts, ...]`."""

  def cut(x):
    x = x.reshape(parts, x.shape[0] // parts, *x.shape[1:])
    return constrain(x, None, ROWS)

  return jax.tree.map(cut, tree)


def join(tree: Any) -> Any:
  """Undoes `split`."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def mapped(fn: Callable[..., Any], parts: int) -> Callable[..., Any]:
  """A function of batches, done part after part: less memory, equal rows.

  Args:
    fn: its arguments and its result have their rows in front.
    parts: 1 returns `fn`.
  """
  if parts == 1:
    return fn

  def run(*batches):
    return join(lax.map(lambda part: fn(*part), split(batches, parts)))

  return run
