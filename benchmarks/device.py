"""Checks and timings of one accelerator, in under six minutes.

    python -m benchmarks.device --json FILE.json          # on a GPU or TPU
    python -m benchmarks.device --small --json            # seconds, on a CPU

First what must be true: on this device the library's bits are those that NumPy
computes here in integers, and these are the ones frozen below, made on a CPU.
Then timings, as far as the time budget goes. Every result is named and
`pass`, `fail` with numbers, or `skipped` with the reason; the exit status is 1
if one fails.

Timings are medians of repeats on donated, warm state, up to the moment when
the device is done; kinds of rounding alternate within a repeat (forwards, then
backwards). `achieved` bytes/s count what the scheme must read and write (28
bytes a parameter for FP32 shadow and moments with BF16 gradients and weights,
26 for `residual16`), `compiled` ones what XLA says that the program accesses.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# As `python -m train` runs: XLA reads the flag when it starts.
_DETERMINISTIC = '--xla_gpu_deterministic_ops=true'
if _DETERMINISTIC not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '') + ' ' + _DETERMINISTIC
  )

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax import lax  # noqa: E402

import sr_optax  # noqa: E402
from benchmarks import optimizer_step  # noqa: E402
from sr_optax import noise  # noqa: E402
from train import arms  # noqa: E402
from train.model import Decoder, ModelConfig  # noqa: E402
from train.rollout import Prompts, generate  # noqa: E402
from train.step import Batch, TrainState, train_step  # noqa: E402

Numbers = dict[str, Any]
_BF16, _FP16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
_NUMPY = {_BF16: np.dtype(ml_dtypes.bfloat16), _FP16: np.dtype(np.float16)}
_INF = {_BF16: 0x7F80, _FP16: 0x7C00}  # bits of +Inf
_QUIET = {_BF16: 0x0040, _FP16: 0x0200}
_MASK = 2**32 - 1

# The last words of tests/sr_optax/test_noise.py's golden vectors for these
# keys and paths: (seed, epoch, path, index, noise word).
_GOLDEN = (
  (0, 0, '', 996, 0x2DEB9CA2),
  (0, 1, 'w', 996, 0xDF532B00),
  (2**31 + 5, 2**32 - 1, 'layers/0/attention/q/kernel', 65535, 0xE04552D0),
  (42, 7, 'layers/11/mlp/up/kernel', 65535, 0x34219652),
  (123456789, 1000000, 'embedding/ä', 996, 0x1950C5E0),
)
# SHA-256, 64 bits of it, of what each check expects: frozen on a CPU.
_FROZEN = {
  'noise': '36593ca6ce83ff22',
  'noise_wide': 'cffbb4564ec74db0',
  'rounding_bfloat16': '403eabf0e7dfb3eb',
  'rounding_float16': 'd784cd486a6744aa',
  'nearest_bfloat16': 'a0a55222de31bf3b',
  'nearest_float16': '957271390daf3134',
  'round_tree_bfloat16': 'b45795cd4075afbc',
  'round_tree_float16': '42a032df46bed185',
  'trajectory_bfloat16_nearest': '8d526c5684a54c7a',
  'trajectory_bfloat16_1': 'a732b7c006b4c1b4',
  'trajectory_bfloat16_inf': 'fcfe936348625fbc',
  'trajectory_bfloat16_1_none': '5d74c8905281ddea',
  'trajectory_float16_1': 'cbc76230e66f9006',
  'residual16_roundtrip': 'b9e4b4e6a0ac57e9',
}


class Failed(Exception):
  """A result that is wrong; `numbers` says how."""

  def __init__(self, **numbers):
    """Keeps what was seen."""
    super().__init__(str(numbers))
    self.numbers = numbers


class Skipped(Exception):
  """A result that this device or this setting does not have."""


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes of the timings."""

  parameters: int  # of the optimizer step
  steps: int  # optimizer steps in a row, timed together
  copied: int  # FP32 elements, to see what the memory can do
  rounds: int  # repeats of optimizer steps and copies
  repeats: int  # of rollouts and training steps
  # Seconds that a timing may take, compiling included: the optimizer's, the
  # model's. It does not start with less left of the budget.
  optimizer_seconds: float
  model_seconds: float
  prompts: int
  group: int  # completions per prompt
  prompt_tokens: int
  new_tokens: int
  micro_batches: int
  model: ModelConfig


SMALL = Setting(
  parameters=400_000,
  steps=2,
  copied=2**18,
  rounds=3,
  repeats=3,
  optimizer_seconds=0,
  model_seconds=0,
  prompts=2,
  group=4,
  prompt_tokens=8,
  new_tokens=6,
  micro_batches=2,
  model=ModelConfig(
    vocab_size=499,
    width=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=12,
    ff_width=112,
    context=32,
    rope_theta=1e4,
    tied_embeddings=True,
    qkv_bias=True,
  ),
)
# The shape of Qwen2.5-1.5B. Weights, shadow and moments take 14 bytes for each
# of its 1.54e9 parameters, 22 GB; compiled for a TPU, the training step peaks
# at 39 GiB (`python -m train.aot`).
FULL = Setting(
  parameters=300_000_000,
  steps=10,
  copied=2**28,
  rounds=7,
  repeats=3,
  optimizer_seconds=25,
  model_seconds=90,
  prompts=16,
  group=8,
  prompt_tokens=128,
  new_tokens=128,
  micro_batches=4,
  model=ModelConfig(
    vocab_size=151_936,
    width=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    head_width=128,
    ff_width=8960,
    context=32_768,
    rope_theta=1e6,
    tied_embeddings=True,
    rms_eps=1e-6,
    qkv_bias=True,
  ),
)


def main(argv: list[str] | None = None) -> int:
  """Runs everything and writes JSON: 1 if a result fails."""
  parser = argparse.ArgumentParser(
    prog='python -m benchmarks.device', description=__doc__.splitlines()[0]
  )
  size = parser.add_mutually_exclusive_group()
  for name, text in (
    ('small', 'small timings (default on a CPU)'),
    ('full', 'a model of 1.5B parameters (default on accelerators)'),
  ):
    size.add_argument(
      f'--{name}', dest='size', action='store_const', const=name, help=text
    )
  parser.add_argument(
    '--budget',
    type=float,
    default=330,
    help='seconds after which the timings that remain are skipped',
  )
  parser.add_argument(
    '--json',
    metavar='FILE',
    nargs='?',
    const='-',
    help='where to write the report; without FILE, standard output',
  )
  options = parser.parse_args(argv)
  on_cpu = jax.default_backend() == 'cpu'
  small = (options.size or ('small' if on_cpu else 'full')) == 'small'
  report = measure(SMALL if small else FULL, options.budget)
  text = json.dumps(report, indent=2, allow_nan=False) + '\n'
  if options.json == '-':
    print(text, end='')
  elif options.json:
    path = pathlib.Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return int(report['status'] == 'fail')


def measure(setting: Setting, budget: float) -> Numbers:
  """All results, correctness first.

  Args:
    setting: sizes of the timings.
    budget: seconds from now after which no timing starts.
  """
  start = time.monotonic()
  run = _Run(start + budget)
  device = optimizer_step.machine()
  for name, check in checks().items():
    run.record('checks', name, check)
  run.timed(
    'memory_bandwidth',
    setting.optimizer_seconds,
    lambda: memory_bandwidth(setting, run),
  )
  optimizer_times(setting, run)
  model_times(setting, run)
  run.record('timings', 'peak_memory', peak_memory)
  results = run.results['checks'] | run.results['timings']
  failed, skipped = (
    [name for name, result in results.items() if result['status'] == status]
    for status in ('fail', 'skipped')
  )
  report = {
    'status': 'fail' if failed else 'pass',
    'failed': failed,
    'skipped': skipped,
    'device': device,
    'setting': dataclasses.asdict(setting),
    'budget_seconds': budget,
    'seconds': time.monotonic() - start,
    **run.results,
  }
  _say(
    f'{report["status"]} after {report["seconds"]:.0f} s, failed: '
    f'{", ".join(failed) or "none"}, skipped: {", ".join(skipped) or "none"}'
  )
  return report


class _Run:
  """Collects named results and knows how much time is left."""

  def __init__(self, deadline: float):
    self.deadline = deadline  # of `time.monotonic`
    self.results = {'checks': {}, 'timings': {}}

  def record(
    self, kind: str, name: str, function: Callable[[], Numbers]
  ) -> bool:
    """Calls a function; its numbers, or why there are none, get the name."""
    start = time.monotonic()
    try:
      result = {'status': 'pass', **function()}
    except Skipped as why:
      result = {'status': 'skipped', 'reason': str(why)}
    except Failed as error:
      result = {'status': 'fail', **error.numbers}
    except Exception as error:  # the other results are worth having
      if kind == 'timings' and 'RESOURCE_EXHAUSTED' in str(error):
        reason = f'out of memory: {str(error)[:200]}'
        result = {'status': 'skipped', 'reason': reason}
      else:
        message = f'{type(error).__name__}: {str(error)[:1000]}'
        result = {'status': 'fail', 'error': message}
    result['total_seconds'] = time.monotonic() - start
    self.results[kind][name] = result
    shown = {
      k: f'{v:.4g}' if isinstance(v, float) else v
      for k, v in result.items()
      if k != 'status' and not isinstance(v, list)
    }
    about = ', '.join(f'{k} {v}' for k, v in shown.items())
    _say(f'{result["status"]:8}{name:30} {about}')
    return result['status'] == 'pass'

  def timed(
    self, name: str, reserve: float, function: Callable[[], Numbers]
  ) -> None:
    """`record` for a timing: skipped with no more than `reserve` seconds left.

    Adds the device's peak memory so far.
    """

    def within_budget():
      if (left := self.deadline - time.monotonic()) <= reserve:
        raise Skipped(
          f'the time budget leaves {max(left, 0):.0f} s, and this may take '
          f'{reserve:g} s'
        )
      return function() | _peak()

    self.record('timings', name, within_budget)

  def seconds(
    self, calls: dict[str, Callable[[], Any]], rounds: int
  ) -> dict[str, list[float]]:
    """Times calls in turns, one round at least, until the time is up."""
    seconds = {name: [] for name in calls}
    for i in range(rounds):
      if i and time.monotonic() > self.deadline:
        break
      for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
        start = time.perf_counter()
        jax.block_until_ready(calls[name]())
        seconds[name].append(time.perf_counter() - start)
    return seconds


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


# What is right, in NumPy and Python integers.


def threefry(key: tuple[int, int], counter: int) -> tuple[int, int]:
  """Threefry-2x32 with 20 rounds (Salmon et al. 2011) of (0, counter)."""
  rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
  k = [*key, 0x1BD11BDA ^ key[0] ^ key[1]]
  x, y = k[0], (counter + k[1]) & _MASK
  for group in range(5):
    for r in rotations[group % 2]:
      x = (x + y) & _MASK
      y = ((y << r | y >> (32 - r)) & _MASK) ^ x
    x = (x + k[(group + 1) % 3]) & _MASK
    y = (y + k[(group + 2) % 3] + group + 1) & _MASK
  return x, y


def expected_noise(
  seed: int, epoch: int, path: str, size: int, first: int = 0
) -> np.ndarray:
  """The noise words of a leaf, in row-major order.

  Args:
    seed: of `jax.random.key`.
    epoch: folded into it.
    path: of the leaf.
    size: number of words.
    first: index of the first one.
  """
  digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
  words = threefry((0, seed), epoch)
  for part in (digest[:4], digest[4:]):
    words = threefry(words, int.from_bytes(part, 'little'))
  index = np.arange(first, first + size, dtype=np.uint64)
  x = (index & np.uint64(_MASK)) * np.uint64(words[1] | 1) + np.uint64(words[0])
  return _permute(x + _permute(index >> np.uint64(32))).astype(np.uint32)


def _permute(x: np.ndarray) -> np.ndarray:
  mask, half = np.uint64(_MASK), np.uint64(15)
  x &= mask
  x = ((x ^ x >> np.uint64(16)) * np.uint64(0x21F0AAAD)) & mask
  x = ((x ^ x >> half) * np.uint64(0x735A2D97)) & mask
  return x ^ x >> half


def expected_rounding(
  word: np.ndarray, u: np.ndarray | None, target: jnp.dtype
) -> np.ndarray:
  """Rounds FP32 words, in units of the target's step; uint16.

  Args:
    word: uint32, bits of the FP32 values.
    u: uint32 noise, 32 bits (BF16 uses the upper 16); None rounds to nearest.
    target: bfloat16 or float16.
  """
  word = np.asarray(word, np.uint32)
  magnitude = (word & 0x7FFFFFFF).astype(np.uint64)
  inf = _INF[target]
  if target == _BF16:
    dropped, base = np.full(word.shape, 16, np.uint64), np.uint64(0)
    significand = magnitude
  else:
    # sig * 2^(e - 150) in steps of 2^(e - 137), of 2^-24 below 2^-14.
    exponent = np.maximum(magnitude >> np.uint64(23), np.uint64(1))
    hidden = (magnitude >= np.uint64(1 << 23)).astype(np.uint64)
    significand = magnitude & np.uint64(0x7FFFFF) | hidden << np.uint64(23)
    step = np.maximum(exponent, np.uint64(113))
    dropped = np.minimum(step - exponent + np.uint64(13), np.uint64(60))
    base = (step - np.uint64(113)) << np.uint64(10)
  kept = significand >> dropped
  # The fraction that is dropped, in 2^-32: exact, or rounded down.
  rest = significand - (kept << dropped)
  fewer = np.minimum(dropped, np.uint64(32))
  fraction = (rest << (np.uint64(32) - fewer)) >> (dropped - fewer)
  if u is None:
    twice, one = rest << np.uint64(1), np.uint64(1) << dropped
    odd = (kept & np.uint64(1)).astype(bool)
    carry = (twice > one) | ((twice == one) & odd)
  else:
    u = np.asarray(u, np.uint64)
    u = u & np.uint64(0xFFFF0000) if target == _BF16 else u
    carry = fraction + u >= np.uint64(2**32)
  code = np.minimum(base + kept + carry, np.uint64(inf - 1))
  code = np.where(magnitude == np.uint64(0x7F800000), inf, code)
  nan = magnitude > np.uint64(0x7F800000)
  code = np.where(nan, inf | _QUIET[target], code).astype(np.uint16)
  return code | (word >> 16 & 0x8000).astype(np.uint16)


def _uniform(seed: int, shape: tuple[int, ...]) -> np.ndarray:
  """FP32 from -1 to 1, of a triangular distribution; the same everywhere."""
  size = math.prod(shape)
  words = expected_noise(seed, 0, 'inputs', 2 * size).astype(np.float64)
  values = (words[:size] - words[size:]) * 2.0**-32
  return values.astype(np.float32).reshape(shape)


def _code(x) -> np.ndarray:
  return np.asarray(x).view(np.uint16)


def _word(x) -> np.ndarray:
  return np.asarray(x).view(np.uint32)


def _widened(code: np.ndarray, target: jnp.dtype) -> np.ndarray:
  """FP32 words of BF16 or FP16 codes."""
  if target == _BF16:
    return code.astype(np.uint32) << 16
  return code.view(np.float16).astype(np.float32).view(np.uint32)


def equal(what: str, got, want: np.ndarray) -> int:
  """Compares bits.

  Returns:
    How many.

  Raises:
    Failed: if one differs; names the first.
  """
  got, want = np.asarray(got), np.asarray(want)
  if got.shape != want.shape or got.dtype != want.dtype:
    raise Failed(what=what, got=str(got.shape), expected=str(want.shape))
  wrong = np.flatnonzero(got.reshape(-1) != want.reshape(-1))
  if len(wrong):
    i = int(wrong[0])
    raise Failed(
      what=what,
      wrong=len(wrong),
      compared=got.size,
      first_index=i,
      first_got=hex(got.reshape(-1)[i]),
      first_expected=hex(want.reshape(-1)[i]),
    )
  return got.size


def frozen(name: str, *arrays: np.ndarray) -> None:
  """Checks that what a check expects is what it always expected.

  Raises:
    Failed: otherwise.
  """
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(np.ascontiguousarray(array).tobytes())
  got = digest.hexdigest()[:16]
  if got != _FROZEN[name]:
    raise Failed(what='digest', got=got, expected=_FROZEN[name])


# Checks.


def checks() -> dict[str, Callable[[], Numbers]]:
  """What must be true on any device, by name."""
  result = {'noise': check_noise, 'noise_wide': check_noise_wide}
  for target in (_BF16, _FP16):
    result |= {
      f'rounding_{target}': lambda t=target: check_rounding(t),
      f'nearest_{target}': lambda t=target: check_nearest(t),
      f'round_tree_{target}': lambda t=target: check_round_tree(t),
      f'nan_{target}': lambda t=target: check_nan(t),
      f'apply_updates_{target}': lambda t=target: check_apply_updates(t),
    }
  key = jax.random.key(_TRAJECTORY_SEED)
  result |= {
    'nearest_casts_not_elided': check_casts,
    'trajectory_nearest': lambda: check_trajectory(
      sr_optax.nearest_rounding(), None
    ),
    'trajectory_fresh': lambda: check_trajectory(
      sr_optax.stochastic_rounding(jnp.copy(key)), 1
    ),
    'trajectory_sticky': lambda: check_trajectory(
      sr_optax.stochastic_rounding(jnp.copy(key), refresh_every=math.inf),
      math.inf,
    ),
    'trajectory_residual16': lambda: check_trajectory(
      sr_optax.stochastic_rounding(jnp.copy(key), shadow='residual16'), 1
    ),
    'trajectory_no_shadow': lambda: check_trajectory(
      sr_optax.stochastic_rounding(jnp.copy(key), shadow=None), 1, shadow=False
    ),
    'trajectory_float16': lambda: check_trajectory(
      sr_optax.stochastic_rounding(jnp.copy(key), dtype=_FP16), 1, _FP16
    ),
    'residual16_roundtrip': check_residual16,
  }
  return result


def _needs(target: jnp.dtype) -> None:
  """Skips what the device cannot even store."""
  if target != _FP16:
    return
  try:
    jax.jit(lambda x: x.astype(_FP16))(jnp.ones(3)).block_until_ready()
  except jax.errors.JaxRuntimeError as error:
    raise Skipped(f'the device has no float16: {str(error)[:200]}') from error


def check_noise() -> Numbers:
  """Noise words of a few keys and paths."""
  expected, compared = [], 0
  shape = (257, 2, 131)
  for seed, epoch, path, index, golden in _GOLDEN:
    want = expected_noise(seed, epoch, path, math.prod(shape)).reshape(shape)
    equal('reference', want.reshape(-1)[index], np.uint32(golden))
    expected.append(want)

    @jax.jit
    def draw(words, epoch, path=path):
      return noise.random_bits(
        noise.leaf_words(noise.fold(words, epoch), [path])[0], shape
      )

    words = jnp.array([0, seed], jnp.uint32)
    compared += equal(path, draw(words, np.uint32(epoch)), want)
  frozen('noise', *expected)
  return {'compared': compared}


def check_noise_wide() -> Numbers:
  """Noise of the last elements of a leaf that no device could hold."""
  shape, size = (2_503, 1_999, 1_009), 8  # 5.0e9 elements
  first = math.prod(shape) - size
  want = expected_noise(7, 3, 'big', size, first)

  @jax.jit
  def tail(words):
    leaf = noise.leaf_words(noise.fold(words, 3), ['big'])[0]
    bits = noise.random_bits(leaf, shape)
    start = [n - 1 for n in shape[:2]] + [shape[2] - size]
    return lax.slice(bits, start, shape)

  compiled = tail.lower(jax.ShapeDtypeStruct((2,), jnp.uint32)).compile()
  memory = compiled.memory_analysis()
  if memory is not None and memory.temp_size_in_bytes > 2**20:
    raise Skipped('the compiler would make the whole leaf')
  got = compiled(jnp.array([0, 7], jnp.uint32)).reshape(-1)
  frozen('noise_wide', want)
  return {'compared': equal('noise_wide', got, want)}


def _all_halves() -> np.ndarray:
  """FP32 words `[65536, 10]`: every upper half with lower halves of note."""
  high = np.arange(2**16, dtype=np.uint32)[:, None]
  low = np.array([0, 1, 2, 0xFFF, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
  some = expected_noise(1, 0, 'low', 2**16)[:, None] >> 16
  low = np.broadcast_to(low.astype(np.uint32)[None], (2**16, len(low)))
  return high << 16 | np.concatenate([low, some], axis=1)


def check_rounding(target: jnp.dtype) -> Numbers:
  """`round_with_bits` of all upper halves, NaN, Inf and subnormals too."""
  _needs(target)
  word = _all_halves()
  u = expected_noise(2, 0, 'draws', word.size).reshape(word.shape)
  given = np.uint16 if target == _BF16 else np.uint32
  run = jax.jit(lambda x, u: sr_optax.round_with_bits(x, u, target))
  expected, compared = [], 0
  ones = np.uint32(_MASK)
  for draws in (u, np.zeros_like(u), np.full_like(u, ones)):
    want = expected_rounding(word, draws, target)
    bits = (draws >> 16 if target == _BF16 else draws).astype(given)
    compared += equal('rounding', _code(run(word.view(np.float32), bits)), want)
    expected.append(want)
  frozen(f'rounding_{target}', *expected)
  return {'compared': compared}


def check_nearest(target: jnp.dtype) -> Numbers:
  """Rounding to nearest even, also against NumPy's own casts."""
  _needs(target)
  word = _all_halves()
  x = word.view(np.float32)
  want = expected_rounding(word, None, target)
  with np.errstate(over='ignore', invalid='ignore'):
    cast = x.astype(_NUMPY[target]).view(np.uint16)
  same = ~np.isnan(x) & ((cast & 0x7FFF) != _INF[target])  # those saturate
  equal('reference', want[same], cast[same])
  tx = sr_optax.nearest_rounding(dtype=target)
  got = jax.jit(lambda x: sr_optax.init_from_shadow(tx, x)[0])(x)
  frozen(f'nearest_{target}', want)
  return {'compared': equal('nearest', _code(got), want)}


def check_round_tree(target: jnp.dtype) -> Numbers:
  """`stochastic_round_tree`: each leaf has the noise of its path."""
  _needs(target)
  shapes = {'embed': (257, 31), 'layers': {'0': {'q': (3, 5, 7, 11)}}}
  tree = jax.tree.map(
    lambda shape: _uniform(3, shape), shapes, is_leaf=lambda x: type(x) is tuple
  )
  want = [
    expected_rounding(
      _word(x), expected_noise(4, 0, path, x.size).reshape(x.shape), target
    )
    for path, x in _named(tree)
  ]
  # `expected_noise` folds the epoch; this key is folded already.
  words = jnp.asarray(threefry((0, 4), 0), jnp.uint32)
  got = jax.jit(lambda w, t: sr_optax.stochastic_round_tree(w, t, target))(
    words, tree
  )
  compared = 0
  for (path, q), w in zip(_named(got), want, strict=True):
    compared += equal(path, _code(q), w)
  frozen(f'round_tree_{target}', *want)
  return {'compared': compared}


def _named(tree) -> list[tuple[str, np.ndarray]]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [
    (jax.tree_util.keystr(path, simple=True, separator='/'), leaf)
    for path, leaf in leaves
  ]


def check_nan(target: jnp.dtype) -> Numbers:
  """The device's own NaN, and NaN of every payload, stay NaN."""
  _needs(target)
  nearest = sr_optax.nearest_rounding(dtype=target)
  links = [
    nearest,
    sr_optax.stochastic_rounding(jax.random.key(5), dtype=target),
  ]
  given = jnp.uint16 if target == _BF16 else jnp.uint32

  def rounded(x):  # NaN in, codes out
    q = [
      sr_optax.round_with_bits(x, jnp.full(x.shape, bits, given), target)
      for bits in (0, jnp.iinfo(given).max)
    ]
    q.append(sr_optax.init_from_shadow(nearest, x)[0])
    return lax.bitcast_convert_type(jnp.stack(q), jnp.uint16)

  def made(zero):
    one = zero + 1
    inf = one / zero
    return jnp.stack([zero / zero, inf - inf, zero * inf, jnp.sqrt(zero - one)])

  def updated(x):  # weights after an update that is NaN
    result = []
    for tx in links:
      p = jnp.ones(x.shape, target)
      updates, state = tx.update(x, tx.init(p), p)
      result.append(optax.apply_updates(p, updates))
      result.append(sr_optax.apply_updates(p, updates, state))
    return lax.bitcast_convert_type(jnp.stack(result), jnp.uint16)

  words = np.asarray(jax.jit(made)(jnp.float32(0)))
  if not np.isnan(words).all():
    raise Failed(what='0/0 is a number', got=words.tolist())
  together = jax.jit(lambda zero: (rounded(made(zero)), updated(made(zero))))
  apart = jax.jit(lambda x: (rounded(x), updated(x)))
  want = expected_rounding(_word(words), None, target)
  want = np.broadcast_to(want, (3, *want.shape))  # whatever the noise
  equal('NaN', np.asarray(apart(words)[0]), want)
  for run, x in ((together, jnp.float32(0)), (apart, words)):
    for codes in map(np.asarray, run(x)):
      if not ((codes & 0x7FFF) > _INF[target]).all():
        raise Failed(
          what='0/0 is lost', got=[hex(c) for c in codes.reshape(-1)]
        )

  @jax.jit
  def lost(high):
    low = jnp.arange(2**16, dtype=jnp.uint32)
    word = high << jnp.uint32(16) | low
    nan = (word & jnp.uint32(0x7FFFFFFF)) > jnp.uint32(0x7F800000)
    q = rounded(lax.bitcast_convert_type(word, jnp.float32))
    sign = (high & jnp.uint32(0x8000)).astype(jnp.uint16)
    want = sign | jnp.uint16(_INF[target] | _QUIET[target])
    return jnp.sum((q != want) & nan[None]), jnp.sum(nan)

  high = np.arange(0x7F80, 0x8000, dtype=np.uint32)
  high = np.concatenate([high, high | 0x8000])
  bad, payloads = jax.jit(lambda x: lax.map(lost, x))(high)
  if np.sum(bad):
    raise Failed(what='payloads lost', wrong=int(np.sum(bad)))
  if np.sum(payloads) != 2**24 - 2:
    raise Failed(what='payloads', got=int(np.sum(payloads)))
  return {
    'payloads': int(np.sum(payloads)),
    'made': [hex(word) for word in _word(words)],
  }


def check_apply_updates(target: jnp.dtype) -> Numbers:
  """Weights land on the rounding of the shadow, however far that is.

  `sr_optax.apply_updates` always, `optax.apply_updates` but for what no FP32
  sum can express (tests/sr_optax/test_landing.py).
  """
  _needs(target)
  size, inf = 100_003, _INF[target]
  draw = [
    expected_noise(6, i, 'pairs', size).astype(np.int64) for i in range(5)
  ]
  sign = (draw[0] & 0x8000, draw[0] >> 1 & 0x8000)
  p = draw[1] % inf
  near = np.clip(p + draw[2] % 4000 - 2000, 0, inf - 1)
  goal = np.where(draw[3] & 1, near, draw[2] % inf) | sign[1]
  p = (p | sign[0]).astype(np.uint16)
  wide = _widened(p, target).view(np.float32)
  goal = _widened(goal.astype(np.uint16), target)
  goal = (goal + (draw[4] >> 20).astype(np.uint32)).view(np.float32)
  with np.errstate(over='ignore'):
    u = goal - wide
  tx = sr_optax.stochastic_rounding(jax.random.key(8), dtype=target)

  @jax.jit
  def step(p, u):
    updates, state = tx.update(u, tx.init(p), p)
    landed = optax.apply_updates(p, updates)
    exact = sr_optax.apply_updates(p, updates, state)
    return landed, exact, state.shadow

  landed, exact, shadow = map(np.asarray, step(p.view(_NUMPY[target]), u))
  # Of the device's own sum, which may flush subnormals.
  truth = expected_rounding(
    _word(shadow), expected_noise(8, 0, '', size), target
  )
  compared = equal('sr_optax.apply_updates', _code(exact), truth)
  q = _widened(truth, target).view(np.float32).astype(np.float64)
  p = wide.astype(np.float64)
  limit = 2.0**16 if target == _BF16 else 2.0**13
  excused = (
    (truth & 0x7FFF == 0)
    | (np.abs(q) < 2.0**-118)
    | (np.abs(p) > limit * np.abs(q))
    | (np.abs(q - p) > np.finfo(np.float32).max)
  )
  equal('optax.apply_updates', _code(landed)[~excused], truth[~excused])
  return {'compared': compared, 'by_optax': int((~excused).sum())}


_TRAJECTORY_SEED, _STEPS = 9, 12


def _start_and_updates(target: jnp.dtype) -> tuple[dict, dict]:
  """Weights below 0.04 on the grid; updates from 1e-6 to 1e-3, by step."""
  shapes = {'embed': (53, 41), 'layers': {'0': {'q': (3, 5, 7, 11)}}}
  leaf = {'is_leaf': lambda x: type(x) is tuple}
  start = jax.tree.map(
    lambda s: (_uniform(10, s) * np.float32(0.04)).astype(_NUMPY[target]),
    shapes,
    **leaf,
  )
  sizes = np.float32(10.0) ** (np.arange(_STEPS, dtype=np.float32) % 4 - 6)

  def updates(shape):
    scale = sizes.reshape(-1, *[1] * len(shape))
    return _uniform(11, (_STEPS, *shape)) * scale

  return start, jax.tree.map(updates, shapes, **leaf)


def check_trajectory(
  tx, refresh_every, target: jnp.dtype = _BF16, shadow: bool = True
) -> Numbers:
  """Weights and shadow of a link over steps, by given FP32 updates, in scan.

  Args:
    tx: the link.
    refresh_every: of its noise; None for rounding to nearest.
    target: dtype of the weights.
    shadow: whether it keeps one.
  """
  _needs(target)
  start, updates = _start_and_updates(target)

  def step(carry, u):
    p, state = carry
    u, state = tx.update(u, state, p)
    exact = sr_optax.apply_updates(p, u, state)
    p = optax.apply_updates(p, u)
    seen = {
      'landed': jax.tree.map(_bits16, p),
      'exact': jax.tree.map(_bits16, exact),
      'widened': jax.tree.map(_bits32, p),
      'shadow': jax.tree.map(_bits32, sr_optax.shadow_params(state, p)),
    }
    return (p, state), seen

  @jax.jit
  def run(p, updates):
    return lax.scan(step, (p, tx.init(p)), updates)[1]

  got = jax.tree.map(np.asarray, run(start, updates))
  compared, expected = 0, []
  for i, (path, p) in enumerate(_named(start)):
    u = _named(updates)[i][1]
    s = p.astype(np.float32)
    codes, shadows = [], []
    for t in range(_STEPS):
      s = s + u[t]
      draws = None
      if refresh_every is not None:
        epoch = 0 if refresh_every == math.inf else t // refresh_every
        draws = expected_noise(_TRAJECTORY_SEED, epoch, path, s.size)
        draws = draws.reshape(s.shape)
      codes.append(expected_rounding(_word(s), draws, target))
      wide = _widened(codes[-1], target)
      s = s if shadow else wide.view(np.float32)
      shadows.append(_word(s))
    codes = np.stack(codes)
    want = {
      'landed': codes,
      'exact': codes,
      'widened': _widened(codes, target),
      'shadow': np.stack(shadows),
    }
    for kind, bits in want.items():
      leaf = _named(got[kind])[i][1]
      compared += equal(f'{kind} {path}', leaf, bits)
    expected += [codes, want['shadow']]
  kind = 'nearest' if refresh_every is None else f'{refresh_every}'
  frozen(f'trajectory_{target}_{kind}{"" if shadow else "_none"}', *expected)
  return {'compared': compared}


def _bits16(x):
  return lax.bitcast_convert_type(x, jnp.uint16)


def _bits32(x):
  return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def check_casts() -> Numbers:
  """The visible weight as FP32 has 16 zero bits; the shadow keeps its own.

  XLA may leave out a cast to BF16 that is followed by one back to FP32, and
  does so with a plain `astype` on some devices: `plain_cast_elided`.
  """
  start, updates = _start_and_updates(_BF16)
  tx = sr_optax.nearest_rounding()

  def step(carry, u):
    p, state = carry
    u, state = tx.update(u, state, p)
    p = optax.apply_updates(p, u)
    # The same shadow rounded again, visible only to this loop.
    again, _ = sr_optax.init_from_shadow(tx, state.shadow)
    plain = jax.tree.map(lambda s: s.astype(_BF16), state.shadow)
    seen = [p, again, plain, state.shadow]
    return (p, state), [jax.tree.map(_bits32, x) for x in seen]

  run = jax.jit(lambda p, u: lax.scan(step, (p, tx.init(p)), u)[1])
  names = 'visible', 'rounded', 'plain', 'shadow'
  share = {}
  for name, tree in zip(names, run(start, updates), strict=True):
    words = np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    share[name] = float(np.mean(words & 0xFFFF != 0))
  off = {f'{k}_off_grid': v for k, v in share.items() if k != 'plain'}
  elided = {'plain_cast_elided': share['plain'] > 0}
  if share['visible'] or share['rounded'] or share['shadow'] < 0.9:
    raise Failed(**off, **elided)
  return off | elided


def check_residual16() -> Numbers:
  """Every upper half: the FP32 shadow out of weight, lower half and noise."""
  word = _all_halves()
  magnitude = word & 0x7FFFFFFF
  word = word[magnitude <= 0x7F7F0000]  # others saturate
  tx = sr_optax.stochastic_rounding(jax.random.key(12), shadow='residual16')
  start = jax.jit(lambda x: sr_optax.init_from_shadow(tx, x))
  params, state = start(word.view(np.float32))
  # The noise before the first step has the last epoch.
  u = expected_noise(12, _MASK, '', word.size)
  want = expected_rounding(word, u, _BF16)
  compared = equal('weights', _code(params), want)
  shadow = jax.jit(lambda s, p: sr_optax.shadow_params(s, p))(state, params)
  compared += equal('shadow', _word(shadow), word)
  frozen('residual16_roundtrip', want)
  return {'compared': compared}


# Timings.


def memory_bandwidth(setting: Setting, run: _Run) -> Numbers:
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


def optimizer_times(setting: Setting, run: _Run) -> None:
  """AdamW steps that end in each kind of rounding."""
  key = jax.random.key(13)
  sticky = {'refresh_every': math.inf}
  links = {
    'optimizer_nearest': (sr_optax.nearest_rounding(), 28),
    'optimizer_fresh': (sr_optax.stochastic_rounding(key), 28),
    'optimizer_sticky': (sr_optax.stochastic_rounding(key, **sticky), 28),
    'optimizer_residual16': (
      sr_optax.stochastic_rounding(key, shadow='residual16'),
      26,
    ),
  }
  shapes = optimizer_step.shapes(setting.parameters)

  @jax.jit
  def inputs(key):
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    params, grads = {}, {}
    for name, shape in shapes.items():
      pair = jax.random.split(keys[name])
      params[name] = 0.02 * jax.random.normal(pair[0], shape, _BF16)
      grads[name] = 1e-3 * jax.random.normal(pair[1], shape, _BF16)
    return params, grads

  made, carries, compiled = [], {}, {}

  def prepare(name, link):
    if not made:
      made.append(inputs(jax.random.key(14)))
    params, grads = made[0]
    variant = optimizer_step.linked(link)
    carry = jax.jit(variant.init)(params)
    step = jax.jit(variant.step, donate_argnums=(0, 1))
    start = time.monotonic()
    step = step.lower(*carry, grads).compile()
    numbers = {'compile_seconds': time.monotonic() - start}
    carries[name] = jax.block_until_ready(step(*carry, grads))
    compiled[name] = step
    return numbers

  def call(name):
    for _ in range(setting.steps):
      carries[name] = compiled[name](*carries[name], made[0][1])
    return carries[name]

  for name, (link, _) in links.items():
    seconds = setting.optimizer_seconds
    run.timed(name, seconds, lambda name=name, link=link: prepare(name, link))
  count = sum(math.prod(shape) for shape in shapes.values())

  def measured():
    calls = {name: lambda name=name: call(name) for name in compiled}
    times = run.seconds(calls, setting.rounds)
    for name, step in compiled.items():
      seconds = statistics.median(times[name]) / setting.steps
      table = links[name][1]
      run.results['timings'][name] |= {
        'seconds': seconds,
        'table_bytes_per_parameter': table,
        'achieved_bytes_per_second': table * count / seconds,
        **_compiled_bytes(step, count, seconds),
        **_ratio(times, name, 'optimizer_nearest'),
      }
      achieved = table * count / seconds / 1e9
      _say(f'        {name:30} {seconds * 1e3:.3f} ms, {achieved:.1f} GB/s')
    rounds = min(map(len, times.values()))
    return {'parameters': count, 'rounds': rounds, 'steps': setting.steps}

  if compiled and not run.record('timings', 'optimizer_rounds', measured):
    rounds = run.results['timings']['optimizer_rounds']
    run.results['timings'] |= dict.fromkeys(compiled, rounds)
  carries.clear()  # the model needs the memory
  made.clear()


def _ratio(times: dict[str, list[float]], name: str, base: str) -> Numbers:
  """Median of the ratios within a round, if the other one was timed."""
  if base not in times:
    return {}
  pairs = zip(times[name], times[base], strict=True)
  return {'ratio_to_nearest': statistics.median(a / b for a, b in pairs)}


def _compiled_bytes(compiled, count: int, seconds: float) -> Numbers:
  """What XLA says of a program, where it does."""
  accessed = (compiled.cost_analysis() or {}).get('bytes accessed')
  memory = compiled.memory_analysis()
  numbers = {
    'compiled_bytes_per_parameter': accessed and accessed / count,
    'compiled_bytes_per_second': accessed and accessed / seconds,
    'temporary_bytes_per_parameter': memory
    and memory.temp_size_in_bytes / count,
  }
  return {name: x for name, x in numbers.items() if x is not None}


def model_times(setting: Setting, run: _Run) -> None:
  """Rollout and training step (`bf16-sr`, remat) of a random model."""
  made = {}

  def train():
    if 'completions' not in made:
      raise Skipped('needs the completions of the rollout')
    return train_time(setting, run, made)

  seconds = setting.model_seconds
  run.timed('rollout', seconds, lambda: rollout_time(setting, run, made))
  run.timed('train_step', seconds, train)


def rollout_time(setting: Setting, run: _Run, made: dict) -> Numbers:
  """Completions of full length; leaves what training needs in `made`."""
  s, config = setting, setting.model

  def model(key):
    rngs = nnx.Rngs(params=key)
    return nnx.split(Decoder(config, param_dtype=_BF16, rngs=rngs), nnx.Param)

  graphdef = nnx.split(
    nnx.eval_shape(
      lambda: Decoder(config, param_dtype=_BF16, rngs=nnx.Rngs(0))
    ),
    nnx.Param,
  )[0]
  params = jax.jit(lambda key: model(key)[1])(jax.random.key(15))
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
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
      compute_dtype=_BF16,
    )

  keys = iter(jax.random.split(jax.random.key(17), s.repeats + 1))

  def call():
    made['sampled'] = sample(params, prompts, next(keys))
    return made['sampled']

  start = time.monotonic()
  jax.block_until_ready(call())
  first = time.monotonic() - start
  seconds = run.seconds({'rollout': call}, s.repeats)['rollout']
  done = jax.device_get(made['sampled'])
  if not (done.lengths == s.new_tokens).all():
    raise Failed(what='completions ended early', got=done.lengths.tolist())
  if not (np.isfinite(done.logprobs).all() and (done.logprobs <= 0).all()):
    raise Failed(what='log-probabilities')
  made |= {
    'graphdef': graphdef,
    'params': params,
    'prompts': prompts,
    'completions': made.pop('sampled'),
  }
  total = s.prompts * s.group * s.new_tokens
  return {
    'parameters': count,
    'tokens': total,
    'first_call_seconds': first,
    'seconds': statistics.median(seconds),
    'tokens_per_second': total / statistics.median(seconds),
    'repeats': len(seconds),
    'all_seconds': seconds,
  }


def train_time(setting: Setting, run: _Run, made: dict) -> Numbers:
  """One update on all completions of the rollout."""
  s = setting
  tx = arms.optimizer(arms.ARMS['bf16-sr'], 1e-6, jax.random.key(18))
  params = made.pop('params')
  holder = [TrainState(params, jax.jit(tx.init)(params))]
  rows = s.prompts * s.group
  advantages = jnp.where(jnp.arange(rows) % 2 == 0, 0.5, -0.5)
  batch = Batch(
    made['prompts'], made['completions'], advantages, jnp.ones(rows, bool)
  )
  step = train_step(
    made['graphdef'],
    tx,
    temperature=1.0,
    compute_dtype=_BF16,
    micro_batches=s.micro_batches,
    remat=True,
  )
  start = time.monotonic()
  compiled = step.lower(holder[0], batch, None).compile()
  compile_seconds = time.monotonic() - start
  del params

  def call():
    holder[0], made['metrics'] = compiled(holder[0], batch, None)
    return made['metrics'], holder[0]

  jax.block_until_ready(call())
  seconds = run.seconds({'step': call}, s.repeats)['step']
  metrics = {k: float(v) for k, v in made['metrics'].items()}
  if not all(math.isfinite(v) for v in metrics.values()):
    raise Failed(what='metrics', **{k: str(v) for k, v in metrics.items()})
  if not 0 < metrics['changed_fraction'] < 1:
    raise Failed(changed_fraction=metrics['changed_fraction'])
  memory = compiled.memory_analysis()
  shown = 'changed_fraction', 'stuck_fraction', 'mismatch_probability'
  median = statistics.median(seconds)
  total = rows * s.new_tokens
  return {
    'tokens': total,
    'compile_seconds': compile_seconds,
    'seconds': median,
    'tokens_per_second': total / median,
    'repeats': len(seconds),
    'all_seconds': seconds,
    **({'temporary_bytes': memory.temp_size_in_bytes} if memory else {}),
    **{name: metrics[name] for name in shown},
  }


def peak_memory() -> Numbers:
  """Of all that ran before."""
  if not (peak := _peak()):
    raise Skipped('the device keeps no memory statistics')
  return peak


def _peak() -> Numbers:
  stats = jax.devices()[0].memory_stats() or {}
  names = 'peak_bytes_in_use', 'bytes_limit'
  return {name: stats[name] for name in names if name in stats}


if __name__ == '__main__':
  sys.exit(main())
