"""A decoder's sizes and options as config.json and GGUF files state them."""

import dataclasses
import math
from typing import Any, NamedTuple

import gguf
import numpy as np

from train.model import ModelConfig, RopeScaling
from train.tokenizer import Tokenizer
from train.weight_layout import PretrainedError, listed


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


def read_config(settings: dict[str, Any]) -> ModelConfig:
  """Reads the content of a config.json.

  Raises:
    PretrainedError: if the decoder is another one.
  """
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


def config_json(
  config: ModelConfig, tokenizer: Tokenizer, dtype: np.dtype
) -> dict[str, Any]:
  """The content of a config.json: undoes `read_config`.

  Raises:
    PretrainedError: if no family has these options.
  """
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


def read_gguf(reader: gguf.GGUFReader, *, tied: bool) -> ModelConfig:
  """Reads the fields of a GGUF file, which do not say whether heads are tied.

  Raises:
    PretrainedError: if the decoder is another one.
  """

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
    raise PretrainedError(f'the config lacks {listed(lost)}')
  return ModelConfig(**values, **options)


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
      f'{key} {kind!r} with {listed(extra)} is not supported'
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
