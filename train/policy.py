"""Policies by name: where their weights come from, and their starting grid."""

import hashlib
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

  def fingerprint(self) -> str:
    """Of the weights, as BF16, on any mesh: what a resumed run starts from.

    Sums, modulo 2^32, of every weight's bits mixed with its place, so that no
    weight has to leave its device.
    """

    @jax.jit
    def sums(params):
      def of(leaf):
        bits = jax.lax.bitcast_convert_type(
          leaf.astype(jnp.bfloat16), jnp.uint16
        ).astype(jnp.uint32)
        place = jnp.uint32(0)
        for axis in range(leaf.ndim):
          index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
          place = _mix(place * jnp.uint32(0x9E3779B9) + index)
        return [
          jnp.sum(_mix(bits ^ _mix(place + jnp.uint32(salt))), dtype=jnp.uint32)
          for salt in range(1, 5)
        ]

      return [of(leaf) for leaf in jax.tree.leaves(params)]

    sums = np.asarray(jax.device_get(sums(self.params)), np.uint32)
    return hashlib.sha256(sums.tobytes()).hexdigest()


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of uint32 that spreads every bit (MurmurHash3's finaliser)."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
  return x ^ (x >> jnp.uint32(16))


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
