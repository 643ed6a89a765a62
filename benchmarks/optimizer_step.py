"""What one AdamW step costs with every kind of rounding.

    python -m benchmarks.optimizer_step --params 16e6 64e6 --out FILE.json

Every variant is one jitted function of donated parameters and state: gradients
in BF16, AdamW in FP32 on the shadow, rounding, weights applied. The variants
alternate within each round (forwards, then backwards), so that drifts of the
machine hit all alike; shown are medians over rounds, and for the ratios medians
of the ratios within a round. Bytes are those of the compiled program: what its
fusions read and write, and the buffers it needs beside inputs and outputs.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import sr_optax

_BASELINE = 'RN'


class Variant(NamedTuple):
  """One way to do the step."""

  init: Callable
  """BF16 parameters -> (parameters, state), fresh buffers."""
  step: Callable
  """(parameters, state, gradients) -> (parameters, state)."""


def main() -> None:
  """Measures, prints tables, writes JSON."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--params', type=float, nargs='+', default=[16e6, 64e6])
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--steps', type=int, default=2, help='timed in a row')
  parser.add_argument('--out', type=pathlib.Path)
  options = parser.parse_args()
  report = {'machine': machine(), 'rounds': options.rounds, 'sizes': []}
  for size in options.params:
    result = measure(int(size), options.rounds, options.steps)
    report['sizes'].append(result)
    print_table(result)
  if options.out:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + '\n')


def variants() -> dict[str, Variant]:
  """All variants by name, the baseline first."""
  key = jax.random.key(0)
  links = {
    _BASELINE: sr_optax.nearest_rounding(),
    'SR': sr_optax.stochastic_rounding(key),
    'SR sticky': sr_optax.stochastic_rounding(key, refresh_every=math.inf),
    'SR residual16': sr_optax.stochastic_rounding(key, shadow='residual16'),
    'SR residual16 sticky': sr_optax.stochastic_rounding(
      key, shadow='residual16', refresh_every=math.inf
    ),
    'SR shadow=None': sr_optax.stochastic_rounding(key, shadow=None),
  }
  result = {name: linked(link) for name, link in links.items()}
  result['SR, exact apply'] = linked(links['SR'], exact=True)
  result['SR by random.bits'] = by_random_bits(key)
  result['FP32 + astype'] = by_astype()
  return result


def linked(link, exact: bool = False) -> Variant:
  """AdamW and a rounding link, with optax's or our `apply_updates`."""
  tx = sr_optax.chain(optax.adamw(1e-6), link)

  def init(params):
    return jax.tree.map(jnp.copy, params), tx.init(params)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    if exact:
      return sr_optax.apply_updates(params, updates, state), state
    return optax.apply_updates(params, updates), state

  return Variant(init, step)


def by_random_bits(key) -> Variant:
  """What one writes first: an FP32 master, rounded with `jax.random.bits`."""
  tx = optax.adamw(1e-6)

  def init(params):
    master = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    count = jnp.zeros((), jnp.int32)
    return jax.tree.map(jnp.copy, params), (master, tx.init(master), count)

  def step(params, state, grads):
    master, inner, count = state
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, inner = tx.update(grads, inner, master)
    master = optax.apply_updates(master, updates)
    leaves, treedef = jax.tree.flatten(master)
    keys = jax.random.split(jax.random.fold_in(key, count), len(leaves))
    rounded = [
      sr_optax.round_with_bits(x, jax.random.bits(k, x.shape, jnp.uint16))
      for x, k in zip(leaves, keys, strict=True)
    ]
    return treedef.unflatten(rounded), (master, inner, count + 1)

  return Variant(init, step)


def by_astype() -> Variant:
  """The plain optax composition: an FP32 master and a cast to BF16."""
  tx = optax.chain(optax.adamw(1e-6))

  def init(params):
    master = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return jax.tree.map(jnp.copy, params), (master, tx.init(master))

  def step(params, state, grads):
    master, inner = state
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, inner = tx.update(grads, inner, master)
    master = optax.apply_updates(master, updates)
    cast = jax.tree.map(lambda x, p: x.astype(p.dtype), master, params)
    return cast, (master, inner)

  return Variant(init, step)


def shapes(size: int) -> dict[str, tuple[int, ...]]:
  """Stacked shapes of a decoder of about `size` parameters."""
  layers, vocabulary = 8, 8192
  # size = 12 layers width^2 + vocabulary width
  root = math.sqrt(vocabulary**2 + 48 * layers * size)  # of the quadratic
  width = max(16, 16 * round((root - vocabulary) / (24 * layers) / 16))
  hidden = 16 * round(width * 8 / 3 / 16)
  return {
    'embedding': (vocabulary, width),
    'qkv': (layers, width, 3 * width),
    'out': (layers, width, width),
    'gate_up': (layers, width, 2 * hidden),
    'down': (layers, hidden, width),
    'norms': (layers, 2, width),
    'final_norm': (width,),
  }


def measure(size: int, rounds: int, steps: int) -> dict:
  """Times all variants at one size."""
  key = jax.random.key(1)
  params, grads = {}, {}
  for i, (name, shape) in enumerate(shapes(size).items()):
    key_p, key_g = jax.random.split(jax.random.fold_in(key, i))
    params[name] = 0.02 * jax.random.normal(key_p, shape, jnp.bfloat16)
    grads[name] = 1e-3 * jax.random.normal(key_g, shape, jnp.bfloat16)
  count = sum(p.size for p in params.values())
  compiled, carries, rows = {}, {}, {}
  for name, variant in variants().items():
    carry = variant.init(params)
    lowered = jax.jit(variant.step, donate_argnums=(0, 1)).lower(*carry, grads)
    run = compiled[name] = lowered.compile()
    carries[name] = jax.block_until_ready(run(*carry, grads))  # warm-up
    temporary = run.memory_analysis().temp_size_in_bytes
    rows[name] = {
      'bytes_accessed_per_param': run.cost_analysis()['bytes accessed'] / count,
      'temporary_bytes_per_param': temporary / count,
    }
  times = {name: [] for name in compiled}
  for i in range(rounds):
    order = list(compiled) if i % 2 == 0 else list(compiled)[::-1]
    for name in order:
      carry = carries[name]
      start = time.perf_counter()
      for _ in range(steps):
        carry = compiled[name](*carry, grads)
      jax.block_until_ready(carry)
      times[name].append((time.perf_counter() - start) / steps / count * 1e9)
      carries[name] = carry
  for name, row in rows.items():
    ratios = [a / b for a, b in zip(times[name], times[_BASELINE], strict=True)]
    row['ns_per_param'] = statistics.median(times[name])
    row['ratio_to_rn'] = statistics.median(ratios)
    row['ns_per_param_rounds'] = times[name]
  return {'params': count, 'variants': rows}


def print_table(result: dict) -> None:
  """Prints one size."""
  print(f'\nAdamW step, {result["params"] / 1e6:.1f}M parameters')
  header = ('ns/param', 'x RN', 'bytes/param', 'temp bytes/param')
  print(f'{"variant":22}' + ''.join(f'{text:>18}' for text in header))
  for name, row in result['variants'].items():
    cells = (
      f'{row["ns_per_param"]:.2f}',
      f'{row["ratio_to_rn"]:.3f}',
      f'{row["bytes_accessed_per_param"]:.2f}',
      f'{row["temporary_bytes_per_param"]:.3f}',
    )
    print(f'{name:22}' + ''.join(f'{cell:>18}' for cell in cells))


def machine() -> dict:
  """Facts that the figures depend on; nothing that names the machine."""
  return {
    'platform': jax.default_backend(),
    'device_kind': jax.devices()[0].device_kind,
    'cores': len(os.sched_getaffinity(0)),
    'load_average': round(os.getloadavg()[0], 1),  # of other jobs, at the start
    'jax': jax.__version__,
    'optax': optax.__version__,
  }


if __name__ == '__main__':
  main()
