"""What a rollout and a training step cost, with and without shared prompts.

    python -m benchmarks.rl_step --json FILE.json
    python -m benchmarks.rl_step --model PATH --prompts 8 --new-tokens 128
    python -m benchmarks.rl_step --tunix-python ENVIRONMENT/bin/python

`shared`: a prompt runs once for its group, as the trainer does it. `own`: every
completion has a prompt of its own, the same computation with groups of one.
Both are the trainer's functions as its loop calls them, results on the host;
sampling never ends early, and a training step measures no divergence from a
reference. `remat`: layers are recomputed in the backward pass, the trainer's
default, for less memory.

With `--tunix-python`, Tunix runs on the same shapes in a process of its own
(`benchmarks/tunix_rl_step.py`). Everything is compiled before it is timed. All
variants alternate within each round (forwards, then backwards), so that drifts
of the machine hit all alike; shown are medians and quartiles over rounds, and
for the ratios those of the ratios within a round.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from benchmarks.optimizer_step import machine
from train import arms, tasks
from train.model import Decoder, ModelConfig
from train.policy import load_policy
from train.rollout import Prompts, cast, generate
from train.step import Batch, TrainState, train_step

_TUNIX = Path(__file__).with_name('tunix_rl_step.py')
_LEARNING_RATE = 1e-6
_PAIRS = (
  ('rollout/shared', 'rollout/own'),
  ('rollout/shared', 'rollout/tunix'),
  ('rollout/shared', 'rollout/tunix-cli-cache'),
  ('rollout/shared', 'rollout/tunix-default-cache'),
  ('rollout/own', 'rollout/tunix'),
  ('train/shared', 'train/own'),
  ('train/shared', 'train/tunix'),
  ('train/own', 'train/tunix'),
  ('train/shared', 'train/shared-remat'),
  ('train/shared-remat', 'train/tunix-remat'),
)


@dataclasses.dataclass(frozen=True)
class Arguments:
  """What a rollout and a training step cost, beside Tunix."""

  model: str = ''
  """Policy as for `python -m train`: a name or the path of a Hugging Face
  directory; default: random weights of the shape below."""
  layers: int = 8
  """Of the random model, as all up to --untied."""
  width: int = 512
  """Of the residual stream."""
  heads: int = 8
  """Of the queries; each is width / heads wide."""
  kv_heads: int = 4
  """Of keys and values."""
  ff_width: int = 1408
  """Of the feed-forward layers."""
  vocabulary: int = 4096
  """Tokens."""
  untied: bool = False
  """A head of its own instead of the embeddings."""
  prompts: int = 4
  """Prompts per step."""
  group: int = 8
  """Completions per prompt."""
  prompt_tokens: int = 32
  """Length of every prompt."""
  new_tokens: int = 64
  """Length of every completion."""
  arm: str = 'fp32'
  """Precision of the weights, see `python -m train --help`."""
  compute_dtype: str = 'float32'
  """Of activations and gradients: float32, bfloat16 or float16."""
  rounds: int = 7
  """Measurements of each variant."""
  threads: int = 0
  """CPU cores to use; 0: all that this process may."""
  tunix_python: Path | None = None
  """Python of an environment with google-tunix, to compare with; FP32 only."""
  json: Path | None = None
  """Where to write the report."""


def main() -> None:
  """Measures, prints tables, writes JSON."""
  arguments = tyro.cli(Arguments, prog='python -m benchmarks.rl_step')
  report = measure(arguments)
  print_report(report)
  if arguments.json:
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + '\n')


def measure(arguments: Arguments) -> dict[str, Any]:
  """Times all variants in turns.

  Raises:
    ValueError: for a precision or a model that Tunix is not measured on.
    RuntimeError: if Tunix's process ends, or counts other parameters.
  """
  a = arguments
  if a.threads:  # XLA and the other process take what this one may use
    cores = sorted(os.sched_getaffinity(0))[: a.threads]
    os.sched_setaffinity(0, cores)
  config, graphdef, params = load(a)
  shapes = {
    name: getattr(a, name)
    for name in ('prompts', 'group', 'prompt_tokens', 'new_tokens')
  }
  report = {
    'machine': machine(),
    'flax': importlib.metadata.version('flax'),
    'arm': a.arm,
    'compute_dtype': a.compute_dtype,
    'model': a.model or 'random',
    'parameters': sum(leaf.size for leaf in jax.tree.leaves(params)),
    'config': dataclasses.asdict(config),
    'shapes': shapes,
    'rounds': a.rounds,
  }
  calls = variants(a, config, graphdef, params)
  with contextlib.ExitStack() as stack:
    if a.tunix_python:
      about, others = stack.enter_context(tunix(a, config))
      if about['parameters'] != report['parameters']:
        raise RuntimeError(
          f'expected {report["parameters"]} parameters, Tunix has '
          f'{about["parameters"]}'
        )
      report['tunix'] = about
      calls |= others
    # Rollouts beside rollouts, training beside training.
    calls = dict(sorted(calls.items(), key=lambda item: item[0].split('/')[0]))
    seconds = alternate(calls, a.rounds)
  report['machine']['load_average_at_end'] = round(os.getloadavg()[0], 1)
  tokens = a.prompts * a.group * a.new_tokens
  report['variants'] = {
    name: summary(values)
    | ({'tokens_per_second': tokens / np.median(values)} if rolls(name) else {})
    | {'seconds': values}
    for name, values in seconds.items()
  }
  report['ratios'] = {
    f'{other} / {name}': summary(np.divide(seconds[other], seconds[name]))
    for name, other in _PAIRS
    if {name, other} <= set(seconds)
  }
  return report


def load(a: Arguments) -> tuple[ModelConfig, nnx.GraphDef, nnx.State]:
  """The policy: its shape, its graph and FP32 weights.

  Raises:
    ValueError: if prompts and completions exceed the model's context.
  """
  total = a.prompt_tokens + a.new_tokens
  if a.model:
    policy = load_policy(a.model, tasks.load_task('addition'))
    if total > policy.config.context:
      raise ValueError(
        f'{total} tokens exceed the context of {a.model}, '
        f'{policy.config.context} tokens'
      )
    return policy.config, policy.graphdef, policy.params
  config = ModelConfig(
    vocab_size=a.vocabulary,
    width=a.width,
    layers=a.layers,
    heads=a.heads,
    kv_heads=a.kv_heads,
    head_width=a.width // a.heads,
    ff_width=a.ff_width,
    context=total,
    rope_theta=10_000.0,
    tied_embeddings=not a.untied,
  )
  return config, *nnx.split(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)


def variants(
  a: Arguments, config: ModelConfig, graphdef: nnx.GraphDef, params: nnx.State
) -> dict[str, Callable[[], Any]]:
  """The trainer's rollouts and steps by name, compiled.

  They share one state, as a run does: each step makes the next one's.
  """
  dtype = jnp.dtype(a.compute_dtype)
  arm = arms.ARMS[a.arm]
  tx = arms.optimizer(arm, _LEARNING_RATE, jax.random.key(1))
  start = jax.jit(lambda weights: arms.start(arm, tx, weights))
  holder = [TrainState(*start(params))]
  size = (a.prompts, a.prompt_tokens)
  rng = np.random.default_rng(1)
  tokens = jnp.asarray(rng.integers(0, config.vocab_size, size, np.int32))
  shared = Prompts(tokens, jnp.full(a.prompts, a.prompt_tokens, jnp.int32))
  own = jax.tree.map(lambda x: jnp.repeat(x, a.group, axis=0), shared)
  endless = jnp.zeros((1, config.vocab_size), jnp.int32)  # nothing ends a text

  def rollout(prompts, group):
    @jax.jit
    def sample(params, prompts, key, temperature):
      return generate(
        nnx.merge(graphdef, cast(params, dtype)),
        prompts,
        key,
        group=group,
        max_new_tokens=a.new_tokens,
        temperature=temperature,
        endings=endless,
        compute_dtype=dtype,
      )

    def call():
      key = jax.random.key(2)
      completions = sample(holder[0].params, prompts, key, 1.0)
      completions = jax.device_get(completions)
      assert (completions.lengths == a.new_tokens).all()
      return completions

    return call

  def train(prompts, remat=False):
    step = train_step(
      graphdef, tx, temperature=1.0, compute_dtype=dtype, remat=remat
    )
    rows = a.prompts * a.group
    advantages = jnp.where(jnp.arange(rows) % 2 == 0, 0.5, -0.5)
    batch = Batch(prompts, sampled, advantages, np.ones(rows, bool))

    def call():
      holder[0], metrics = step(holder[0], batch, None)
      metrics = jax.device_get(metrics)
      assert np.isfinite(metrics['loss'])
      return metrics

    return call

  calls = {
    'rollout/shared': rollout(shared, a.group),
    'rollout/own': rollout(own, 1),
  }
  sampled = calls['rollout/shared']()
  calls |= {
    'train/shared': train(shared),
    'train/own': train(own),
    'train/shared-remat': train(shared, remat=True),
  }
  for call in calls.values():
    for _ in range(2):  # whatever compiles again would do so here
      call()
  return calls


@contextlib.contextmanager
def tunix(
  a: Arguments, config: ModelConfig
) -> Iterator[tuple[dict[str, Any], dict[str, Callable[[], float]]]]:
  """Tunix in its process: what it runs on, and its variants by name."""
  if (a.arm, a.compute_dtype) != ('fp32', 'float32'):
    raise ValueError('beside Tunix expected arm=fp32, compute_dtype=float32')
  if config.qkv_bias or config.qk_norm:
    raise ValueError('beside Tunix expected the shape of a Llama')
  names = (
    'vocab_size', 'width', 'layers', 'heads', 'kv_heads', 'head_width',
    'ff_width', 'tied_embeddings',
  )  # fmt: skip
  shapes = {name: getattr(config, name) for name in names} | {
    'prompts': a.prompts,
    'group': a.group,
    'prompt_tokens': a.prompt_tokens,
    'new_tokens': a.new_tokens,
    'learning_rate': _LEARNING_RATE,
  }
  process = subprocess.Popen(
    [a.tunix_python, _TUNIX, json.dumps(shapes)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    bufsize=1,
  )

  def answer():
    line = process.stdout.readline()
    if not line:
      raise RuntimeError(f'Tunix ended with status {process.wait()}')
    return json.loads(line)

  def call(name):
    print(name, file=process.stdin)
    return answer()

  with process:  # its input is closed at the end: it stops
    about = answer()
    calls = {
      name: lambda name=name: call(name) for name in about.pop('variants')
    }
    yield about, calls


def alternate(
  calls: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
  """Seconds of every call in every round; a float that one returns counts."""
  seconds = {name: [] for name in calls}
  for i in range(rounds):
    for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
      start = time.perf_counter()
      result = calls[name]()
      elapsed = time.perf_counter() - start
      seconds[name].append(result if isinstance(result, float) else elapsed)
      if sys.stderr.isatty():
        print(
          f'round {i + 1} of {rounds}: {name:30}', end='\r', file=sys.stderr
        )
  return seconds


def summary(values) -> dict[str, float]:
  """Median and quartiles."""
  low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
  return {'median': median, 'quartile_1': low, 'quartile_3': high}


def rolls(name: str) -> bool:
  """Whether a variant generates tokens."""
  return name.startswith('rollout/')


def print_report(report: dict[str, Any]) -> None:
  """Prints what was compared, seconds, tokens a second, and ratios."""
  shapes, where = report['shapes'], report['machine']
  config = report['config']
  print(
    f'{report["model"]} model, {report["parameters"] / 1e6:.1f}M parameters: '
    f'{config["layers"]} layers, width {config["width"]}, '
    f'{config["heads"]} heads, {config["kv_heads"]} kv heads, '
    f'vocabulary {config["vocab_size"]}\n'
    f'{shapes["prompts"]} prompts x {shapes["group"]} completions, '
    f'{shapes["prompt_tokens"]} + {shapes["new_tokens"]} tokens, '
    f'weights {report["arm"]}, computed in {report["compute_dtype"]}\n'
    f'{where["device_kind"]}, {where["cores"]} cores, '
    f'load {where["load_average"]} to {where["load_average_at_end"]}, '
    f'jax {where["jax"]}, flax {report["flax"]}, optax {where["optax"]}'
  )
  if 'tunix' in report:
    other = report['tunix']
    print(
      f'tunix {other["google-tunix"]} on {other["device_kind"]}, '
      f'jax {other["jax"]}, flax {other["flax"]}, optax {other["optax"]}'
    )
  print(f'\n{"variant":30}{"s":>9}{"[quartiles]":>18}{"tokens/s":>10}')
  for name, row in report['variants'].items():
    rate = f'{row["tokens_per_second"]:.0f}' if rolls(name) else ''
    print(f'{name:30}{_spread(row, 3)}{rate:>10}')
  print(f'\n{"ratio of seconds":58}{"":>9}{"[quartiles]":>18}')
  for name, row in report['ratios'].items():
    print(f'{name:58}{_spread(row, 2)}')


def _spread(row: dict[str, float], digits: int) -> str:
  low, high = (
    f'{row[name]:.{digits}f}' for name in ('quartile_1', 'quartile_3')
  )
  return f'{row["median"]:9.{digits}f}{f"[{low}, {high}]":>18}'


if __name__ == '__main__':
  main()
