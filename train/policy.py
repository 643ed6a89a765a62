"""Policies by name: where their weights come from, and their starting grid."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train import pretrained
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

  def fingerprint(self) -> str:
    """SHA-256 of the weights, as BF16: what a resumed run must start from."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(self.params):
      digest.update(np.asarray(leaf.astype(jnp.bfloat16)).tobytes())
    return digest.hexdigest()


def load_policy(model: str, task: Task) -> Policy:
  """Loads a policy and puts its weights on the BF16 grid.

  Released checkpoints lie on that grid, so every arm starts from the same
  weights; FP32 weights (a dequantised copy, a warmed-up model) are rounded to
  nearest once, here.

  Args:
    model: one of `NAMES`, or the path of a Hugging Face directory.
    task: what the tiny ones are warmed up on.

  Raises:
    ConfigError: for an unknown name.
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
  on_grid = jax.tree.map(
    lambda x: jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32),
    loaded.params,
  )
  graphdef, params = build(loaded.config, on_grid)
  return Policy(loaded.config, graphdef, params, loaded.tokenizer)


def build(
  config: ModelConfig, params: dict[str, Any]
) -> tuple[nnx.GraphDef, nnx.State]:
  """A decoder with the given parameters, split for functional use."""
  abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
  graphdef, state = nnx.split(abstract, nnx.Param)
  nnx.replace_by_pure_dict(state, params)
  return graphdef, state
