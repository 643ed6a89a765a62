"""What a rollout and a training step of a random model cost."""

import math
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.device.reference import expected_noise
from benchmarks.device.results import Failed, Numbers, Run, Skipped
from benchmarks.device.settings import Setting
from train import arms
from train.model import Decoder
from train.rollout import Completions, Prompts, generate
from train.step import Batch, TrainState, train_step


class Rollout(NamedTuple):
  """What the training step needs of a rollout."""

  graphdef: nnx.GraphDef
  params: nnx.State
  prompts: Prompts
  completions: Completions


def measure(setting: Setting, run: Run) -> None:
  """Records the rollout, then a training step (`bf16-sr`, remat) on it."""
  made = []

  def rollout():
    numbers, result = rollout_time(setting, run)
    made.append(result)
    return numbers

  def train():
    if not made:
      raise Skipped('needs the completions of the rollout')
    return train_time(setting, run, made.pop())

  run.timed('rollout', setting.model_seconds, rollout)
  run.timed('train_step', setting.model_seconds, train)


def rollout_time(s: Setting, run: Run) -> tuple[Numbers, Rollout]:
  """Completions of full length, by weights in BF16."""
  config = s.model

  @jax.jit
  def model(key):
    rngs = nnx.Rngs(params=key)
    decoder = Decoder(config, param_dtype=jnp.bfloat16, rngs=rngs)
    return nnx.split(decoder, nnx.Param)

  graphdef, params = model(jax.random.key(15))
  words = expected_noise(16, 0, 'prompts', s.prompts * s.prompt_tokens)
  tokens = (words % config.vocab_size).astype(np.int32)
  prompts = Prompts(
    jnp.asarray(tokens.reshape(s.prompts, s.prompt_tokens)),
    jnp.full(s.prompts, s.prompt_tokens, jnp.int32),
  )
  endless = jnp.zeros((1, config.vocab_size), jnp.int32)

  @jax.jit
  def sample(params, prompts, key):
    return generate(
      nnx.merge(graphdef, params),
      prompts,
      key,
      group=s.group,
      max_new_tokens=s.new_tokens,
      temperature=1.0,
      endings=endless,
      compute_dtype=jnp.bfloat16,
    )

  keys = iter(jax.random.split(jax.random.key(17), s.repeats + 1))
  last = {}

  def call():
    last['completions'] = sample(params, prompts, next(keys))
    return last['completions']

  start = time.monotonic()
  jax.block_until_ready(call())
  first = time.monotonic() - start
  seconds = run.seconds({'rollout': call}, s.repeats)['rollout']
  done = jax.device_get(last['completions'])
  if not (done.lengths == s.new_tokens).all():
    raise Failed(what='completions ended early', got=done.lengths.tolist())
  if not (np.isfinite(done.logprobs).all() and (done.logprobs <= 0).all()):
    raise Failed(what='log-probabilities')
  numbers = {
    'parameters': sum(leaf.size for leaf in jax.tree.leaves(params)),
    'first_call_seconds': first,
    **_speed(s, seconds),
  }
  return numbers, Rollout(graphdef, params, prompts, last['completions'])


def train_time(s: Setting, run: Run, rollout: Rollout) -> Numbers:
  """One update on all completions of the rollout; its weights are donated."""
  tx = arms.optimizer(arms.ARMS['bf16-sr'], 1e-6, jax.random.key(18))
  last = {'state': TrainState(rollout.params, jax.jit(tx.init)(rollout.params))}
  rows = s.prompts * s.group
  advantages = jnp.where(jnp.arange(rows) % 2 == 0, 0.5, -0.5)
  batch = Batch(
    rollout.prompts, rollout.completions, advantages, jnp.ones(rows, bool)
  )
  step = train_step(
    rollout.graphdef,
    tx,
    temperature=1.0,
    compute_dtype=jnp.bfloat16,
    micro_batches=s.micro_batches,
    remat=True,
  )
  start = time.monotonic()
  compiled = step.lower(last['state'], batch, None).compile()
  compile_seconds = time.monotonic() - start

  def call():
    last['state'], last['metrics'] = compiled(last['state'], batch, None)
    return last

  jax.block_until_ready(call())
  seconds = run.seconds({'step': call}, s.repeats)['step']
  metrics = {k: float(v) for k, v in last['metrics'].items()}
  if not all(map(math.isfinite, metrics.values())):
    raise Failed(what='metrics', **{k: str(v) for k, v in metrics.items()})
  if not 0 < metrics['changed_fraction'] < 1:
    raise Failed(changed_fraction=metrics['changed_fraction'])
  numbers = {'compile_seconds': compile_seconds, **_speed(s, seconds)}
  if memory := compiled.memory_analysis():
    numbers['temporary_bytes'] = memory.temp_size_in_bytes
  shown = 'changed_fraction', 'stuck_fraction', 'mismatch_probability'
  return numbers | {name: metrics[name] for name in shown}


def _speed(s: Setting, seconds: list[float]) -> Numbers:
  tokens = s.prompts * s.group * s.new_tokens
  median = statistics.median(seconds)
  return {
    'tokens': tokens,
    'seconds': median,
    'tokens_per_second': tokens / median,
    'repeats': len(seconds),
    'all_seconds': seconds,
  }
