"""Micro-batches: a batch worked off in parts that end at group borders.

Every leaf of a batch has its rows in front, prompts `[P, ...]` or completions
`[B, ...]` prompt-major. Cut into n equal parts, row i of the prompts and its
completions stay together. Within a batch, what is large per token is worked
off in parts of the time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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


def over_time(fn: Callable[..., Any], parts: int) -> Callable[..., Any]:
  """The same for parts of the time instead of the rows.

  Args:
    fn: its arguments and its result are trees of `[B, T, ...]`; T is padded
      with zeros to a multiple of `parts`.
    parts: at least 1.
  """

  def run(*batches):
    time = jax.tree.leaves(batches)[0].shape[1]
    size = -(-time // parts)

    def cut(x):  # [B, T, ...] -> [parts, B, size, ...]
      padding = [(0, 0)] * x.ndim
      padding[1] = 0, parts * size - time
      x = jnp.pad(x, padding)
      return jnp.moveaxis(x.reshape(len(x), parts, size, *x.shape[2:]), 1, 0)

    def join(x):
      x = jnp.moveaxis(x, 0, 1)
      return x.reshape(len(x), parts * size, *x.shape[3:])[:, :time]

    done = lax.map(lambda x: fn(*x), jax.tree.map(cut, batches))
    return jax.tree.map(join, done)

  return run
