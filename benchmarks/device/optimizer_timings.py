"""What AdamW steps cost that end in each kind of rounding, and a copy."""

import functools
import math
import statistics
import time

import jax
import jax.numpy as jnp
import optax

import sr_optax
from benchmarks import optimizer_step
from benchmarks.device.results import Numbers, Run, say
from benchmarks.device.settings import Setting

_BASE = 'optimizer_nearest'
# What a step reads and writes of each parameter.
_TABLE_BYTES = {
  _BASE: 28,
  'optimizer_fresh': 28,
  'optimizer_sticky': 28,
  'optimizer_residual16': 26,
}


def measure(setting: Setting, run: Run) -> None:
  """Records the copy, then the steps; their memory is free afterwards."""
  seconds = setting.optimizer_seconds
  copying = functools.partial(memory_bandwidth, setting, run)
  run.timed('memory_bandwidth', seconds, copying)
  steps = Steps(setting)
  for name in _TABLE_BYTES:
    run.timed(name, seconds, functools.partial(steps.prepare, name))
  if not steps.compiled:
    return
  timing = functools.partial(steps.measure, run)
  if not run.record('timings', 'optimizer_rounds', timing):
    rounds = run.results['timings']['optimizer_rounds']
    run.results['timings'] |= dict.fromkeys(steps.compiled, rounds)


def memory_bandwidth(setting: Setting, run: Run) -> Numbers:
  """What the device's memory can do: FP32 read, negated and written."""
  size = setting.copied
  copy = jax.jit(lambda x: -x, donate_argnums=0)
  holder = [copy(jnp.ones(size, jnp.float32))]

  def call():
    for _ in range(setting.steps):
      holder[0] = copy(holder[0])
    return holder[0]

  jax.block_until_ready(call())
  seconds = run.seconds({'copy': call}, setting.rounds)['copy']
  seconds = statistics.median(seconds) / setting.steps
  return {'seconds': seconds, 'bytes_per_second': 8 * size / seconds}


class Steps:
  """One compiled step, its parameters and its state for each kind."""

  def __init__(self, setting: Setting):
    """Takes no memory yet."""
    self.setting = setting
    self.shapes = optimizer_step.shapes(setting.parameters)
    self.count = sum(map(math.prod, self.shapes.values()))
    self.compiled, self.carries = {}, {}

  @functools.cached_property
  def inputs(self) -> tuple[dict, dict]:
    """Parameters and gradients of all kinds."""
    like = {
      name: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
      for name, shape in self.shapes.items()
    }

    @jax.jit
    def normal(key, scale):
      return optax.tree.scale(scale, optax.tree.random_like(key, like))

    key_params, key_grads = jax.random.split(jax.random.key(14))
    return normal(key_params, 0.02), normal(key_grads, 1e-3)

  def prepare(self, name: str) -> Numbers:
    """Compiles a kind and warms it up."""
    params, grads = self.inputs
    variant = optimizer_step.linked(_link(name))
    carry = jax.jit(variant.init)(params)
    step = jax.jit(variant.step, donate_argnums=(0, 1))
    start = time.monotonic()
    step = step.lower(*carry, grads).compile()
    numbers = {'compile_seconds': time.monotonic() - start}
    self.carries[name] = jax.block_until_ready(step(*carry, grads))
    self.compiled[name] = step
    return numbers

  def call(self, name: str):
    """As many steps as are timed together."""
    for _ in range(self.setting.steps):
      self.carries[name] = self.compiled[name](
        *self.carries[name], self.inputs[1]
      )
    return self.carries[name]

  def measure(self, run: Run) -> Numbers:
    """Times all kinds in turns and adds to what was recorded of each."""
    setting, count = self.setting, self.count
    calls = {name: functools.partial(self.call, name) for name in self.compiled}
    times = run.seconds(calls, setting.rounds)
    for name, step in self.compiled.items():
      seconds = statistics.median(times[name]) / setting.steps
      table = _TABLE_BYTES[name]
      achieved = table * count / seconds
      run.results['timings'][name] |= {
        'seconds': seconds,
        'table_bytes_per_parameter': table,
        'achieved_bytes_per_second': achieved,
        **_compiled_bytes(step, count, seconds),
      }
      if _BASE in times:  # the ratios within a round
        pairs = zip(times[name], times[_BASE], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        run.results['timings'][name]['ratio_to_nearest'] = ratio
      rate = f'{achieved / 1e9:.1f} GB/s'
      say(f'        {name:30} {seconds * 1e3:.3f} ms, {rate}')
    rounds = min(map(len, times.values()))
    return {'parameters': count, 'rounds': rounds, 'steps': setting.steps}


def _link(name: str) -> optax.GradientTransformationExtraArgs:
  if name == _BASE:
    return sr_optax.nearest_rounding()
  options = {
    'optimizer_fresh': {},
    'optimizer_sticky': {'refresh_every': math.inf},
    'optimizer_residual16': {'shadow': 'residual16'},
  }
  return sr_optax.stochastic_rounding(jax.random.key(13), **options[name])


def _compiled_bytes(compiled, count: int, seconds: float) -> Numbers:
  """What XLA says of a program, where it does."""
  numbers = {}
  accessed = (compiled.cost_analysis() or {}).get('bytes accessed')
  if accessed is not None:
    numbers['compiled_bytes_per_parameter'] = accessed / count
    numbers['compiled_bytes_per_second'] = accessed / seconds
  if memory := compiled.memory_analysis():
    temporary = memory.temp_size_in_bytes
    numbers['temporary_bytes_per_parameter'] = temporary / count
  return numbers
