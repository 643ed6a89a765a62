"""Where each parameter of a decoder lies in a checkpoint.

One table, `_WEIGHTS`, names the tensors and says how their axes are ordered;
loading and saving both follow it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from train.model import ModelConfig


class PretrainedError(ValueError):
  """A checkpoint that cannot be used; the message says which and why."""


class _Weight(NamedTuple):
  """A parameter and its place in checkpoints.

  Letters are axes (legend in `model.py`), those of one word flattened into
  one dimension. Names with `{}` are per layer, stacked along L here.
  """

  path: str
  axes: str
  stored: str
  huggingface: str
  gguf: str
  option: str = ''


def _layer(path, axes, stored, huggingface, gguf_name, option=''):
  return _Weight(
    f'blocks/{path}',
    axes,
    stored,
    f'model.layers.{{}}.{huggingface}',
    f'blk.{{}}.{gguf_name}',
    option,
  )


# fmt: off
_WEIGHTS = (
  _Weight('embed', 'VD', 'V D', 'model.embed_tokens.weight',
          'token_embd.weight'),
  _layer('attention_norm', 'D', 'D', 'input_layernorm.weight',
         'attn_norm.weight'),
  _layer('q', 'DNH', 'NH D', 'self_attn.q_proj.weight', 'attn_q.weight'),
  _layer('k', 'DKH', 'KH D', 'self_attn.k_proj.weight', 'attn_k.weight'),
  _layer('v', 'DKH', 'KH D', 'self_attn.v_proj.weight', 'attn_v.weight'),
  _layer('o', 'NHD', 'D NH', 'self_attn.o_proj.weight', 'attn_output.weight'),
  _layer('q_bias', 'NH', 'NH', 'self_attn.q_proj.bias', 'attn_q.bias',
         'qkv_bias'),
  _layer('k_bias', 'KH', 'KH', 'self_attn.k_proj.bias', 'attn_k.bias',
         'qkv_bias'),
  _layer('v_bias', 'KH', 'KH', 'self_attn.v_proj.bias', 'attn_v.bias',
         'qkv_bias'),
  _layer('q_norm', 'H', 'H', 'self_attn.q_norm.weight', 'attn_q_norm.weight',
         'qk_norm'),
  _layer('k_norm', 'H', 'H', 'self_attn.k_norm.weight', 'attn_k_norm.weight',
         'qk_norm'),
  _layer('mlp_norm', 'D', 'D', 'post_attention_layernorm.weight',
         'ffn_norm.weight'),
  _layer('gate', 'DF', 'F D', 'mlp.gate_proj.weight', 'ffn_gate.weight'),
  _layer('up', 'DF', 'F D', 'mlp.up_proj.weight', 'ffn_up.weight'),
  _layer('down', 'FD', 'D F', 'mlp.down_proj.weight', 'ffn_down.weight'),
  _Weight('norm', 'D', 'D', 'model.norm.weight', 'output_norm.weight'),
  _Weight('head', 'DV', 'V D', 'lm_head.weight', 'output.weight', 'untied'),
)
# fmt: on


class Place(NamedTuple):
  """Where a parameter of one model lies in its checkpoint."""

  path: str
  names: list[str]  # of its tensors, one a layer
  words: tuple[tuple[int, ...], ...]  # sizes of the axes of each dimension
  order: list[int]  # transposes these axes to our order

  @property
  def stacked(self) -> bool:
    """Whether there is one a layer."""
    return self.path.startswith('blocks/')

  @property
  def stored(self) -> tuple[int, ...]:
    """Shape of each tensor in the file."""
    return tuple(map(math.prod, self.words))

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the parameter."""
    split = [size for word in self.words for size in word]
    one = tuple(split[i] for i in self.order)
    return (len(self.names), *one) if self.stacked else one


def places(config: ModelConfig, source: str) -> Iterator[Place]:
  """Yields the place of every parameter; source is a column of `_WEIGHTS`."""
  sizes = {
    'V': config.vocab_size,
    'D': config.width,
    'F': config.ff_width,
    'N': config.heads,
    'K': config.kv_heads,
    'H': config.head_width,
  }
  options = {
    '': True,
    'qkv_bias': config.qkv_bias,
    'qk_norm': config.qk_norm,
    'untied': not config.tied_embeddings,
  }
  for weight in _WEIGHTS:
    if options[weight.option]:
      name, words = getattr(weight, source), weight.stored.split()
      layers = config.layers if weight.path.startswith('blocks/') else 1
      axes = ''.join(words)
      yield Place(
        weight.path,
        [name.format(layer) for layer in range(layers)],
        tuple(tuple(sizes[axis] for axis in word) for word in words),
        [axes.index(axis) for axis in weight.axes],
      )


@dataclasses.dataclass(frozen=True)
class Stored:
  """A parameter in a checkpoint; what is indexed is read, and no more."""

  shape: tuple[int, ...]
  _place: Place
  # (name of a tensor, the window to read) -> array
  _read: Callable[[str, tuple[slice, ...]], np.ndarray]

  @property
  def ndim(self) -> int:
    """Number of axes."""
    return len(self.shape)

  def __getitem__(self, index: Any) -> np.ndarray:
    """Reads a part.

    Args:
      index: a slice of step 1 for every axis; `...` reads all.
    """
    if index is ...:
      index = (slice(None),) * self.ndim
    place = self._place
    if place.stacked:
      names = place.names[index[0]]
      return np.stack([self._tensor(name, index[1:]) for name in names])
    return self._tensor(place.names[0], index)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:  # noqa: D105
    return np.asarray(self[...], dtype)

  def _tensor(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    place = self._place
    window, inner, shape = [], [], []
    order = iter(np.argsort(place.order))
    for word in place.words:  # axes that are one dimension in the file
      first, *others = (next(order) for _ in word)
      start, stop, _ = index[first].indices(word[0])
      step = math.prod(word[1:])
      window.append(slice(start * step, stop * step))
      inner += [slice(None), *(index[axis] for axis in others)]
      shape += [stop - start, *word[1:]]
    part = self._read(name, tuple(window)).reshape(shape)[tuple(inner)]
    return np.ascontiguousarray(part.transpose(place.order))


def listed(names: Iterable[str], most: int = 5) -> str:
  """Names for a message, the first few of them."""
  names = sorted(names)
  more = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(names[:most]) + more
