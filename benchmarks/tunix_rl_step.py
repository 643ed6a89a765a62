"""Tunix on the shapes of `benchmarks.rl_step`, in an environment of its own.

    PYTHON benchmarks/tunix_rl_step.py SHAPES

`benchmarks.rl_step --tunix-python PYTHON` starts it. SHAPES is a JSON object:
the fields of `Shapes`. It writes lines of JSON: first what it runs
on, with everything compiled; then, for each variant's name that it reads, the
seconds of one call. Nothing of this repository is imported.

Generation is `tunix.generate.sampler.Sampler`, training
`tunix.rl.trainer.Trainer` with Dr.GRPO as its learner sets it up. As it comes,
but for three things, each to its advantage: the key-value cache has no more
slots than needed (its own choices, that of its command line and that of its
`RolloutConfig`, are measured as well), there is neither KL nor a second pass
for old log-probabilities, and its tokenizer does nothing.
"""

import dataclasses
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama
from tunix.rl import algo_core, common
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

_PACKAGES = ('google-tunix', 'jax', 'flax', 'optax')
_PAD = 0
_CLI_EXTRA_SLOTS = 256  # tunix.cli.grpo_main: prompt + response + 256


@dataclasses.dataclass(frozen=True)
class Shapes:
  """What `benchmarks.rl_step` measures, all in FP32."""

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_width: int
  ff_width: int
  tied_embeddings: bool
  prompts: int
  group: int
  prompt_tokens: int
  new_tokens: int
  learning_rate: float

  @property
  def total(self) -> int:
    """Tokens of a sequence."""
    return self.prompt_tokens + self.new_tokens


class Tokenizer:
  """Token ids written out; no id ends a completion."""

  def __init__(self, vocab_size: int):
    """The end-of-text id lies behind the vocabulary: it is never sampled."""
    self._vocab_size = vocab_size

  def encode(self, text: str) -> list[int]:
    """Reads token ids."""
    return [int(word) for word in text.split()]

  def decode(self, ids: list[int]) -> str:
    """Costs nothing."""
    return ''

  def bos_id(self) -> int:
    """None: 0 is not put in front."""
    return 0

  def eos_id(self) -> int:
    """Never sampled."""
    return self._vocab_size

  def pad_id(self) -> int:
    """Not in the prompts."""
    return _PAD


def main() -> None:
  """Compiles all variants, then times those it is told to."""
  # Libraries may print: the answers have the real stdout to themselves.
  answers = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)
  shapes = Shapes(**json.loads(sys.argv[1]))
  model = decoder(shapes, llama.RematConfig.NONE)
  caches = {  # slots
    'rollout/tunix': shapes.total,
    'rollout/tunix-cli-cache': shapes.total + _CLI_EXTRA_SLOTS,
    'rollout/tunix-default-cache': RolloutConfig().kv_cache_size,
  }
  calls = {
    name: rollout(shapes, model, slots)
    for name, slots in caches.items()
    if slots >= shapes.total
  }
  calls['train/tunix'] = train(shapes, model)
  rematerialised = decoder(shapes, llama.RematConfig.DECODER)
  calls['train/tunix-remat'] = train(shapes, rematerialised)
  for call in calls.values():
    for _ in range(2):  # the second shows whether anything compiles again
      call()
  leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
  about = {
    'parameters': sum(leaf.size for leaf in leaves),
    'dtypes': sorted({str(leaf.dtype) for leaf in leaves}),
    'device_kind': jax.devices()[0].device_kind,
    'cache_slots': caches,
    'variants': list(calls),
  } | {name: importlib.metadata.version(name) for name in _PACKAGES}
  print(json.dumps(about), file=answers)
  for line in sys.stdin:
    call = calls[line.strip()]
    start = time.perf_counter()
    call()
    print(json.dumps(time.perf_counter() - start), file=answers)


def decoder(shapes: Shapes, remat: llama.RematConfig) -> nnx.Module:
  """Tunix's Llama 3, with random weights where it starts from zeros."""
  config = llama.ModelConfig(
    num_layers=shapes.layers,
    vocab_size=shapes.vocab_size,
    embed_dim=shapes.width,
    hidden_dim=shapes.ff_width,
    num_heads=shapes.heads,
    head_dim=shapes.head_width,
    num_kv_heads=shapes.kv_heads,
    rope_theta=10_000,
    norm_eps=1e-5,
    weight_tying=shapes.tied_embeddings,
    remat_config=remat,
  )
  model = llama.Llama3(config, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)

  def draw(leaf):
    if leaf.ndim == 1:  # a norm's weight
      return leaf
    return jnp.asarray(0.02 * rng.standard_normal(leaf.shape, np.float32))

  nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
  return model


def rollout(shapes: Shapes, model: nnx.Module, cache: int) -> Callable:
  """Samples completions from the whole distribution."""
  sampler = Sampler(
    model,
    Tokenizer(shapes.vocab_size),
    CacheConfig(cache, shapes.layers, shapes.kv_heads, shapes.head_width),
  )
  prompts, _ = tokens(shapes)
  texts = [' '.join(map(str, row)) for row in prompts]

  def call():
    output = sampler(
      texts,
      max_generation_steps=shapes.new_tokens,
      max_prompt_length=shapes.prompt_tokens,
      temperature=1.0,
      top_p=1.0,
    )
    lengths = {len(row) for row in output.tokens}
    if lengths != {shapes.new_tokens}:
      raise RuntimeError(f'expected {shapes.new_tokens} tokens, got {lengths}')

  return call


def train(shapes: Shapes, model: nnx.Module) -> Callable:
  """One step of Adam, as the learner makes it; the model is changed."""
  trainer = Trainer(
    model,
    optax.adam(shapes.learning_rate),
    TrainingConfig(eval_every_n_steps=1),
    custom_checkpoint_metadata_fn=dict,
  )
  trainer.is_managed_externally = True  # by a loop: `train` makes one step
  algorithm = DrGRPOConfig(num_generations=shapes.group, beta=0.0)
  algorithm.temperature = 1.0

  def loss(model, train_example):
    return algo_core.grpo_loss_fn(
      model, train_example, algorithm, pad_id=_PAD, eos_id=shapes.vocab_size
    )

  trainer.with_loss_fn(loss, has_aux=True)
  trainer.with_gen_model_input_fn(lambda x: {'train_example': x})
  trainer.with_rl_metrics_to_log({'kl': np.mean, 'pg_clipfrac': np.mean})
  prompts, completions = map(jnp.asarray, tokens(shapes))
  batch = prompts.shape[0]
  example = common.TrainExample(
    prompt_ids=prompts,
    prompt_mask=prompts != _PAD,
    completion_ids=completions,
    completion_mask=completions != _PAD,
    advantages=jnp.where(jnp.arange(batch) % 2 == 0, 0.5, -0.5),
    ref_per_token_logps=None,
    old_per_token_logps=None,
  )

  def call():
    trainer.train([example])
    jax.block_until_ready(nnx.state(model, nnx.Param))

  return call


def tokens(shapes: Shapes) -> tuple[np.ndarray, np.ndarray]:
  """Prompts and completions, int32 `[B, S]` and `[B, T]`, without padding."""
  rng = np.random.default_rng(1)
  size = (shapes.prompts, shapes.prompt_tokens)
  prompts = rng.integers(_PAD + 1, shapes.vocab_size, size, np.int32)
  prompts = np.repeat(prompts, shapes.group, axis=0)
  size = (len(prompts), shapes.new_tokens)
  return prompts, rng.integers(_PAD + 1, shapes.vocab_size, size, np.int32)


if __name__ == '__main__':
  main()
