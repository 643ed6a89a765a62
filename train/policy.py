"""Policies by name: where their weights come from, and their starting grid."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from train import pretrained, sharding
from train.config import ConfigError
from train.model import Decoder, ModelConfig
from train.tasks import Task
from train.tokenizer import Tokenizer

NAMES = ('smollm2', 'tiny', 'tiny-wide')


class Policy(NamedTuple):
  """A decoder to train."""

  config: ModelConfig
  graphdef: nnx.GraphDef
  params: nnx.State | None  # float32, every value on the BF16 grid
  tokenizer: Tokenizer
  mesh: Mesh  # that the parameters lie on


def load_policy(model: str, task: Task, mesh: Mesh | None = None) -> Policy:
  """Loads a policy and puts its weights on the BF16 grid.

  Released checkpoints lie on that grid, so every arm starts from the same
  weights; FP32 weights (a dequantised copy, a warmed-up model) are rounded to
  nearest once, here.

  Args:
    model: one of `NAMES`, or the path of a Hugging Face directory.
    task: what the tiny ones are warmed up on.
    mesh: where the weights go, each device's share straight from the file;
      default: the first device.

  Raises:
    ConfigError: for an unknown name.
    MeshError: if the mesh does not fit the model.
    PretrainedError: if the checkpoint cannot be used.
  """
  if model == 'smollm2':
    loaded = pretrained.load_gguf(pretrained.find_smollm2())
  elif model in ('tiny', 'tiny-wide'):
    if not task.listed:
      raise ConfigError(f'{model} is warmed up on built-in tasks only')
    from train import warmup  # only here: it builds on this module

    loaded = pretrained.load_huggingface(warmup.tiny(task, model))
  elif '/' in model or Path(model).exists():
    loaded = pretrained.load_huggingface(model)
  else:
    raise ConfigError(
      f'unknown model {model!r}; there are: {", ".join(NAMES)}, or the path of '
      'a Hugging Face directory'
    )
  if mesh is None:
    mesh = sharding.make_mesh('', jax.devices()[:1])
  config = loaded.config
  sharding.check_heads(config.heads, config.kv_heads, mesh)

  def place(stored, where):
    def read(index):
      part = stored[index]
      return part.astype(jnp.bfloat16).astype(np.float32)

    return sharding.place(stored.shape, where, read)

  params = jax.tree.map(
    place, loaded.stored, sharding.shardings(loaded.stored, mesh)
  )
  graphdef, params = build(config, params)
  return Policy(config, graphdef, params, loaded.tokenizer, mesh)


def build(
  config: ModelConfig, params: dict[str, Any]
) -> tuple[nnx.GraphDef, nnx.State]:
  """A decoder with the given parameters, split for functional use."""
  abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
  graphdef, state = nnx.split(abstract, nnx.Param)
  nnx.replace_by_pure_dict(state, params)
  return graphdef, state
