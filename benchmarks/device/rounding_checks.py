"""What must be true of noise and rounding on any device."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import sr_optax
from benchmarks.device.reference import (
  BF16,
  FP16,
  GOLDEN,
  INF,
  MASK,
  NUMPY,
  QUIET,
  all_halves,
  bits16,
  bits32,
  equal,
  expected_noise,
  expected_rounding,
  frozen,
  named,
  threefry,
  uniform_tree,
)
from benchmarks.device.results import Failed, Numbers, Skipped
from sr_optax import noise


def checks() -> dict[str, Callable[[], Numbers]]:
  """The checks by name."""
  result = {'noise': check_noise, 'noise_wide': check_noise_wide}
  for target in (BF16, FP16):
    for name, check in (
      ('rounding', check_rounding),
      ('nearest', check_nearest),
      ('round_tree', check_round_tree),
      ('nan', check_nan),
    ):
      result[f'{name}_{target}'] = functools.partial(check, target)
  return result


def needs(target: jnp.dtype) -> None:
  """Skips what the device cannot even store."""
  if target != FP16:
    return
  try:
    jax.jit(lambda x: x.astype(FP16))(jnp.ones(3)).block_until_ready()
  except jax.errors.JaxRuntimeError as error:
    raise Skipped(f'the device has no float16: {str(error)[:200]}') from error


def check_noise() -> Numbers:
  """Noise words of a few keys and paths."""
  expected, compared = [], 0
  shape = (257, 2, 131)
  for seed, epoch, path, index, golden in GOLDEN:
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
  want = expected_noise(7, 3, 'big', size, first=math.prod(shape) - size)

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


def check_rounding(target: jnp.dtype) -> Numbers:
  """`round_with_bits` of all upper halves, NaN, Inf and subnormals too."""
  needs(target)
  word = all_halves()
  u = expected_noise(2, 0, 'draws', word.size).reshape(word.shape)
  run = jax.jit(lambda x, u: sr_optax.round_with_bits(x, u, target))
  expected, compared = [], 0
  for draws in (u, np.zeros_like(u), np.full_like(u, MASK)):
    want = expected_rounding(word, draws, target)
    bits = (draws >> 16).astype(np.uint16) if target == BF16 else draws
    got = run(word.view(np.float32), bits)
    compared += equal('rounding', bits16(got), want)
    expected.append(want)
  frozen(f'rounding_{target}', *expected)
  return {'compared': compared}


def check_nearest(target: jnp.dtype) -> Numbers:
  """Rounding to nearest even, also against NumPy's own casts."""
  needs(target)
  word = all_halves()
  x = word.view(np.float32)
  want = expected_rounding(word, None, target)
  with np.errstate(over='ignore', invalid='ignore'):
    cast = bits16(x.astype(NUMPY[target]))
  same = ~np.isnan(x) & ((cast & 0x7FFF) != INF[target])  # those saturate
  equal('reference', want[same], cast[same])
  tx = sr_optax.nearest_rounding(dtype=target)
  got = jax.jit(lambda x: sr_optax.init_from_shadow(tx, x)[0])(x)
  frozen(f'nearest_{target}', want)
  return {'compared': equal('nearest', bits16(got), want)}


def check_round_tree(target: jnp.dtype) -> Numbers:
  """`stochastic_round_tree`: each leaf has the noise of its path."""
  needs(target)
  tree = uniform_tree(3, (257, 31))
  want = [
    expected_rounding(
      bits32(x), expected_noise(4, 0, path, x.size).reshape(x.shape), target
    )
    for path, x in named(tree)
  ]
  # `expected_noise` folds the epoch; this key is folded already.
  words = jnp.asarray(threefry((0, 4), 0), jnp.uint32)
  got = jax.jit(lambda w, t: sr_optax.stochastic_round_tree(w, t, target))(
    words, tree
  )
  compared = 0
  for (path, q), w in zip(named(got), want, strict=True):
    compared += equal(path, bits16(q), w)
  frozen(f'round_tree_{target}', *want)
  return {'compared': compared}


def check_nan(target: jnp.dtype) -> Numbers:
  """The device's own NaN, and NaN of every payload, stay NaN."""
  needs(target)
  nearest = sr_optax.nearest_rounding(dtype=target)
  links = [
    nearest,
    sr_optax.stochastic_rounding(jax.random.key(5), dtype=target),
  ]
  given = jnp.uint16 if target == BF16 else jnp.uint32

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
  want = expected_rounding(bits32(words), None, target)
  want = np.broadcast_to(want, (3, *want.shape))  # whatever the noise
  equal('NaN', np.asarray(apart(words)[0]), want)
  for run, x in ((together, jnp.float32(0)), (apart, words)):
    for codes in map(np.asarray, run(x)):
      if not ((codes & 0x7FFF) > INF[target]).all():
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
    want = sign | jnp.uint16(INF[target] | QUIET[target])
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
    'made': [hex(word) for word in bits32(words)],
  }
