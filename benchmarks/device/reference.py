"""What is right, in NumPy and Python integers, and frozen for good."""

import hashlib
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.device.results import Failed

BF16, FP16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
NUMPY = {BF16: np.dtype(ml_dtypes.bfloat16), FP16: np.dtype(np.float16)}
INF = {BF16: 0x7F80, FP16: 0x7C00}  # bits of +Inf
QUIET = {BF16: 0x0040, FP16: 0x0200}
MASK = 2**32 - 1

# The last words of tests/sr_optax/test_noise.py's golden vectors for these
# keys and paths: (seed, epoch, path, index, noise word).
GOLDEN = (
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


def threefry(key: tuple[int, int], counter: int) -> tuple[int, int]:
  """Threefry-2x32 with 20 rounds (Salmon et al. 2011) of (0, counter)."""
  rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
  k = [*key, 0x1BD11BDA ^ key[0] ^ key[1]]
  x, y = k[0], (counter + k[1]) & MASK
  for group in range(5):
    for r in rotations[group % 2]:
      x = (x + y) & MASK
      y = ((y << r | y >> (32 - r)) & MASK) ^ x
    x = (x + k[(group + 1) % 3]) & MASK
    y = (y + k[(group + 2) % 3] + group + 1) & MASK
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
  x = (index & np.uint64(MASK)) * np.uint64(words[1] | 1) + np.uint64(words[0])
  return _permute(x + _permute(index >> np.uint64(32))).astype(np.uint32)


def _permute(x: np.ndarray) -> np.ndarray:
  mask, half = np.uint64(MASK), np.uint64(15)
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
  inf = INF[target]
  if target == BF16:
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
    u = u & np.uint64(0xFFFF0000) if target == BF16 else u
    carry = fraction + u >= np.uint64(2**32)
  code = np.minimum(base + kept + carry, np.uint64(inf - 1))
  code = np.where(magnitude == np.uint64(0x7F800000), inf, code)
  nan = magnitude > np.uint64(0x7F800000)
  code = np.where(nan, inf | QUIET[target], code).astype(np.uint16)
  return code | (word >> 16 & 0x8000).astype(np.uint16)


def uniform(seed: int, shape: tuple[int, ...]) -> np.ndarray:
  """FP32 from -1 to 1, of a triangular distribution; the same everywhere."""
  size = math.prod(shape)
  words = expected_noise(seed, 0, 'inputs', 2 * size).astype(np.float64)
  values = (words[:size] - words[size:]) * 2.0**-32
  return values.astype(np.float32).reshape(shape)


def uniform_tree(seed: int, embed: tuple[int, ...]) -> dict:
  """Two leaves of `uniform`, one of them deep; `embed` is a shape."""
  q = uniform(seed, (3, 5, 7, 11))
  return {'embed': uniform(seed, embed), 'layers': {'0': {'q': q}}}


def named(tree) -> list[tuple[str, np.ndarray]]:
  """Paths, as the noise knows them, and leaves."""
  return [
    (jax.tree_util.keystr(path, simple=True, separator='/'), leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]


def all_halves() -> np.ndarray:
  """FP32 words `[65536, 10]`: every upper half with lower halves of note."""
  high = np.arange(2**16, dtype=np.uint32)[:, None]
  low = np.array([0, 1, 2, 0xFFF, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
  some = expected_noise(1, 0, 'low', 2**16)[:, None] >> 16
  low = np.broadcast_to(low.astype(np.uint32)[None], (2**16, len(low)))
  return high << 16 | np.concatenate([low, some], axis=1)


def bits16(x) -> np.ndarray:
  """Codes of BF16 or FP16 values."""
  return np.asarray(x).view(np.uint16)


def bits32(x) -> np.ndarray:
  """Words of FP32 values."""
  return np.asarray(x).view(np.uint32)


def widened(code: np.ndarray, target: jnp.dtype) -> np.ndarray:
  """FP32 words of BF16 or FP16 codes."""
  if target == BF16:
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
