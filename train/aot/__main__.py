"""`python -m train.aot`: compiles a run for devices that are not there.

Rollout and train step are compiled for a TPU topology (or for virtual CPU
devices) from shapes alone, and what they need and do is told per device.
"""

import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The TPU compiler must not look for the machine that it would run on, nor claim
# it for itself: several may compile at once.
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from train import arms, loss_scale, programs, sharding  # noqa: E402
from train.aot import hlo  # noqa: E402
from train.config import Config, ConfigError  # noqa: E402
from train.model import Decoder, ModelConfig  # noqa: E402
from train.presets import PRESETS  # noqa: E402
from train.rollout import Completions, Prompts  # noqa: E402
from train.sharding import MeshError  # noqa: E402
from train.step import Batch, Reference, TrainState  # noqa: E402

_GIB = 2**30


class _Chip(NamedTuple):
  memory: int  # GiB of HBM
  example: str
  platform_name: str  # as the compiler calls it


# https://docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x.
CHIPS = {
  'v4': _Chip(32, 'v4:2x2x4', 'v4'),
  'v5e': _Chip(16, 'v5e:4x4', 'v5e'),
  'v5p': _Chip(95, 'v5p:4x4x4', 'v5p'),
  'v6e': _Chip(32, 'v6e:4x4', 'v6e'),
  'v7x': _Chip(192, 'v7x:2x2x4', 'tpu7x'),
}
# The runtime keeps a little for itself: on v5e 15.75 of 16 GiB can be used.
_USABLE = 0.98


class TopologyError(ValueError):
  """Devices that cannot be compiled for; the message is for the user."""


@dataclasses.dataclass(frozen=True)
class Check:
  """Compiles rollout and train step for devices that are not there.

  Exit status: 0 if everything fits, 1 if not, 2 for flags that make no sense.
  """

  model: str = 'Qwen2.5-7B'
  """One of: SmolLM2-135M, Qwen2.5-1.5B, Qwen2.5-7B, Llama-3.1-8B, Qwen3-32B."""
  topology: str = 'v5p:4x4x4'
  """GENERATION:CHIPS, of v4, v5e, v5p, v6e, v7x (needs libtpu, but no TPU); or
  cpu:N, N virtual devices."""
  mesh: str = Config.mesh
  """Devices along each axis, as for `python -m train`."""
  arm: str = Config.arm
  """Precision of the weights, as for `python -m train`."""
  prompts: int = 64
  """Prompts per step."""
  group: int = Config.group
  """Completions per prompt."""
  prompt_tokens: int = 512
  """Tokens of the longest prompt."""
  max_new_tokens: int = 1024
  """Longest completion in tokens."""
  micro_batch: int = Config.micro_batch
  """Prompts per forward and backward pass, with their completions; 0: all."""
  kl_every: int = Config.kl_every
  """0 keeps no reference."""
  remat: bool = Config.remat
  """Recompute layers in the backward pass."""
  compute_dtype: str = 'bfloat16'
  """Of activations and gradients: float32, bfloat16 or float16."""
  json: Path | None = None
  """Write what was found to this file."""
  hlo: Path | None = None
  """Write the compiled programs to this folder, as text."""

  def run_config(self) -> Config:
    """The same as a run would be told.

    Raises:
      ConfigError: for what no run accepts.
    """
    if self.model not in PRESETS:
      raise ConfigError(
        f'unknown model {self.model!r}; there are: {", ".join(PRESETS)}'
      )
    if self.compute_dtype == 'auto':
      raise ConfigError(
        'compute_dtype: expected float32, bfloat16 or float16, got auto'
      )
    context = PRESETS[self.model].context
    if not 1 <= self.prompt_tokens <= context - self.max_new_tokens:
      raise ConfigError(
        f'prompt_tokens: expected 1 to {context - self.max_new_tokens} '
        f'(context of {context} less the new tokens), got {self.prompt_tokens}'
      )
    same = {field.name for field in dataclasses.fields(Config)} - {'model'}
    return Config(**{k: v for k, v in vars(self).items() if k in same})


def find_devices(topology: str) -> tuple[Sequence[jax.Device], float | None]:
  """The devices of a topology.

  Args:
    topology: `cpu:N`, before JAX has looked for devices, or see `CHIPS`.

  Returns:
    The devices, and the bytes of memory of each, if known.

  Raises:
    TopologyError: if there is no such topology, or no compiler for it.
  """
  kind, _, size = topology.partition(':')
  if kind == 'cpu' and re.fullmatch('[1-9][0-9]*', size):
    jax.config.update('jax_num_cpu_devices', int(size))
    return jax.devices('cpu'), None
  if kind not in CHIPS or not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)+', size):
    known = ', '.join(chip.example for chip in CHIPS.values())
    raise TopologyError(
      f'unknown topology {topology!r}; there are, with the number of chips '
      f'along each axis: cpu:8, {known}'
    )
  try:
    import libtpu  # noqa: F401
  except ImportError:
    raise TopologyError(
      f'{topology} needs the TPU compiler, which runs without a TPU: pip '
      "install 'jax[tpu]'"
    ) from None
  chip = CHIPS[kind]
  try:
    found = topologies.get_topology_desc(
      platform='tpu', topology_name=f'{chip.platform_name}:{size}'
    )
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    raise TopologyError(
      f'topology {topology!r} is not possible (one that is: {chip.example}): '
      f'{error}'
    ) from error
  chips = math.prod(map(int, size.split('x')))
  # Some chips are two devices, which share its memory.
  return found.devices, chip.memory * _GIB * chips / len(found.devices)


class _Program(NamedTuple):
  """What is compiled."""

  lower: Any  # () -> jax.stages.Lowered
  held: int  # bytes on a device that are no argument of it
  open_trips: int  # turns of its loop that may end early


def check(task: Check) -> dict[str, Any]:
  """Compiles everything that `task` describes.

  Returns:
    What `--json` writes.

  Raises:
    ConfigError, MeshError, TopologyError: for what the user can mend.
  """
  config, model = task.run_config(), PRESETS[task.model]
  devices, memory = find_devices(task.topology)
  mesh = sharding.make_mesh(task.mesh, devices)
  sharding.check_heads(model.heads, model.kv_heads, mesh)
  # Before the mesh is set: nothing can run on its devices.
  tx = arms.optimizer(arms.ARMS[config.arm], config.lr, jax.random.key(0))
  with jax.set_mesh(mesh):
    state, compiling = _programs(config, model, task, mesh, tx)
    result = {
      **{
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(task).items()
        if name not in ('json', 'hlo')
      },
      'devices': len(devices),
      'mesh': dict(mesh.shape),
      'parameters': state.pop('count'),
      'memory_bytes': memory,
      'state_bytes': state,
      'programs': {},
    }
    for name, program in compiling.items():
      result['programs'][name] = _compile(name, program, memory, task.hlo)
  fits = [p['fits'] for p in result['programs'].values()]
  result['fits'] = None if memory is None else all(fits)
  return result


def _programs(config: Config, model: ModelConfig, task: Check, mesh: Mesh, tx):
  """The bytes of the state on a device, and the programs."""
  abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
  graphdef, weights = nnx.split(abstract, nnx.Param)
  arm, compute_dtype = arms.ARMS[config.arm], jnp.dtype(task.compute_dtype)
  built = programs.build(
    config,
    graphdef,
    tx,
    endings=np.zeros((1, model.vocab_size), np.int32),
    compute_dtype=compute_dtype,
    mesh=mesh,
    weights=weights,
  )
  replicated, rows = NamedSharding(mesh, P()), sharding.rows(mesh)

  def place(tree, shardings=None):
    if shardings is None:
      shardings = sharding.shardings(tree, mesh)
    if isinstance(shardings, NamedSharding):
      where = shardings
      shardings = jax.tree.map(lambda _: where, tree)
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      tree,
      shardings,
    )

  params, opt_state = place(
    jax.eval_shape(lambda w: arms.start(arm, tx, w), weights)
  )
  scaler = None
  if arm.loss_scaling and compute_dtype == jnp.float16:
    scaler = place(jax.eval_shape(loss_scale.init), replicated)
  state = TrainState(params, opt_state, scaler)

  def of_rows(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

  count = config.prompts * programs.prompt_copies(config, mesh)
  batch, time = config.prompts * config.group, config.max_new_tokens
  prompts = Prompts(
    of_rows(count, task.prompt_tokens, dtype=jnp.int32),
    of_rows(count, dtype=jnp.int32),
  )
  completions = Completions(
    of_rows(batch, time, dtype=jnp.int32),
    of_rows(batch, time),
    of_rows(batch, dtype=jnp.int32),
    of_rows(batch, dtype=bool),
  )
  sampled = Batch(
    prompts,
    completions,
    # From the host, as a run does: every device gets them whole.
    jax.ShapeDtypeStruct((batch,), jnp.float32),
    jax.ShapeDtypeStruct((batch,), bool),
  )
  reference = None
  if config.kl_every:
    policy = place(
      jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), weights
      )
    )
    hidden = of_rows(batch, time, model.width, dtype=compute_dtype)
    reference = Reference(policy, hidden)
  key = jax.eval_shape(lambda: jax.random.key(0))
  key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated)
  temperature = jax.ShapeDtypeStruct((), jnp.float32)

  held = _state_bytes(state)
  held['reference'] = _device_bytes(reference and reference.params)
  others = sum(held.values()) - held['parameters']
  size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
  return held | {'count': size}, {
    'rollout': _Program(
      lambda: built.rollout.lower(params, prompts, key, temperature),
      others,
      max(time - 1, 1),
    ),
    'train_step': _Program(
      lambda: built.train_step.lower(state, sampled, reference), 0, 1
    ),
  }


def _device_bytes(tree: Any) -> int:
  """Bytes of a tree on one device."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def _state_bytes(state: TrainState) -> dict[str, int]:
  total = dict.fromkeys(('shadow', 'moments', 'rest'), 0)
  for path, leaf in jax.tree.leaves_with_path(state.opt_state):
    names = jax.tree_util.keystr(path, simple=True, separator='/').split('/')
    kind = 'rest'
    if 'shadow' in names:
      kind = 'shadow'
    elif 'mu' in names or 'nu' in names:
      kind = 'moments'
    total[kind] += _device_bytes(leaf)
  total['rest'] += _device_bytes(state.scaler)
  return {'parameters': _device_bytes(state.params), **total}


def _compile(
  name: str, program: _Program, memory: float | None, folder: Path | None
) -> dict[str, Any]:
  started = time.monotonic()
  try:
    compiled = program.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    # What follows lists buffers.
    return {'fits': False, 'error': str(error).split('\n\n')[0]}
  seconds = time.monotonic() - started
  text = compiled.as_text()
  if folder is not None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f'{name}.txt').write_text(text)
  sizes = compiled.memory_analysis()
  program_bytes = (
    sizes.argument_size_in_bytes
    + sizes.output_size_in_bytes
    - sizes.alias_size_in_bytes
    + sizes.temp_size_in_bytes
    + sizes.generated_code_size_in_bytes
  )
  peak = program_bytes + program.held
  costs = hlo.Module(text).costs(program.open_trips)
  analysis = compiled.cost_analysis()
  return {
    'fits': None if memory is None else peak <= _USABLE * memory,
    'argument_bytes': sizes.argument_size_in_bytes,
    'temporary_bytes': sizes.temp_size_in_bytes,
    'held_bytes': program.held,
    'peak_bytes': peak,
    'flops': costs.flops,
    'bytes_accessed': costs.bytes,
    'loops_once': {
      'flops': analysis.get('flops'),
      'bytes_accessed': analysis.get('bytes accessed'),
    },
    'open_loops': costs.open_loops,
    'collectives': {k: v._asdict() for k, v in costs.collectives.items()},
    'compile_seconds': round(seconds, 1),
  }


def show(result: dict[str, Any]) -> None:
  """Prints what one device holds, computes and moves."""
  mesh = ', '.join(f'{axis} {n}' for axis, n in result['mesh'].items())
  print(
    f'{result["model"]}, {result["parameters"] / 1e9:.2f}B parameters, '
    f'{result["arm"]}, on {result["topology"]}: {result["devices"]} devices '
    f'({mesh})\n{result["prompts"]} prompts of {result["prompt_tokens"]} '
    f'tokens x {result["group"]} completions of {result["max_new_tokens"]}; '
    f'computing in {result["compute_dtype"]}\n\nper device'
  )

  def line(name, value, unit):
    print(f'  {name:28}{value:12.3f} {unit}')

  for name, size in result['state_bytes'].items():
    line(name, size / _GIB, 'GiB')
  compiled = {}
  for name, program in result['programs'].items():
    if 'error' in program:
      print(f'{name}: the compiler found no room for it\n  {program["error"]}')
      continue
    compiled[name] = program
    print(f'{name} (compiled in {program["compile_seconds"]:.0f} s)')
    line('temporaries', program['temporary_bytes'] / _GIB, 'GiB')
    line('peak, with all that is kept', program['peak_bytes'] / _GIB, 'GiB')
    line('matrix products', program['flops'] / 1e12, 'Tflop')
    line('read and written', program['bytes_accessed'] / 1e9, 'GB')
    for kind, moved in program['collectives'].items():
      line(kind, moved['bytes'] / 1e9, f'GB in {moved["count"]}')
  if result['fits'] is not None:
    memory = result['memory_bytes'] / _GIB
    most = 'more than there is'
    if len(compiled) == len(result['programs']):
      most = f'{max(p["peak_bytes"] for p in compiled.values()) / _GIB:.1f}'
    print(
      f'{"fits" if result["fits"] else "DOES NOT FIT"}: {most} of '
      f'{memory:.0f} GiB'
    )


def main() -> int:
  """Checks; see `Check` for the exit status."""
  task = tyro.cli(Check, prog='python -m train.aot')
  jax.config.update('jax_platforms', 'cpu')
  try:
    result = check(task)
    if task.json is not None:
      task.json.write_text(json.dumps(result, indent=2) + '\n')
  except (ConfigError, MeshError, TopologyError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  show(result)
  return 1 if result['fits'] is False else 0


if __name__ == '__main__':
  sys.exit(main())
