"""The pure core, against enumeration and NumPy integers of 64 bits."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sr_optax

BF16, FP16 = jnp.bfloat16, jnp.float16
ALL_BITS = np.arange(2**16, dtype=np.uint16)
# Every grid value of the finite positive half axis, as exact float64.
GRID = {
  'bfloat16': ALL_BITS[:0x7F80].view(ml_dtypes.bfloat16).astype(np.float64),
  'float16': ALL_BITS[:0x7C00].view(np.float16).astype(np.float64),
}
EDGES = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)

round_bf16 = jax.jit(lambda x, u: sr_optax.round_with_bits(x, u))
round_fp16 = jax.jit(lambda x, u: sr_optax.round_with_bits(x, u, FP16))


def float32(bits):
  return np.asarray(bits, np.uint32).view(np.float32)


def code(q):
  return np.asarray(q).view(np.uint16)


def fp16_shift_and_rest(magnitude: int) -> tuple[int, Fraction]:
  """Of a positive FP32 word: dropped bits, and the fraction of a step."""
  value = Fraction(float(float32(magnitude)))
  step = Fraction(2) ** max(
    (magnitude >> 23) - 127 - 10, -24
  )  # 10 mantissa bits; subnormals are 2^-24 apart
  dropped = max((magnitude >> 23) - 127 - 10, -24) - (
    max(magnitude >> 23, 1) - 127 - 23
  )
  return dropped, value / step % 1


def test_the_count_rounded_away_from_zero_is_the_dropped_bits_exactly():
  # Every binade (subnormals are exponent 0), both signs, three lower halves
  # and one upper mantissa each; all 65,536 draws.
  rng = np.random.default_rng(0)
  exponent = np.arange(255, dtype=np.uint32)[:, None, None]
  sign = np.array([0, 1], np.uint32)[None, :, None]
  low = np.concatenate(
    [np.array([1, 0xFFFF]), rng.integers(2, 0xFFFF, 1)]
  ).astype(np.uint32)[None, None]
  high = rng.integers(0, 126, (255, 1, 1)).astype(np.uint32)
  word = (sign << 31 | exponent << 23 | high << 16 | low).reshape(-1)

  @jax.jit
  def count(x):
    q = sr_optax.round_with_bits(
      jnp.full((2**16,), x), jnp.arange(2**16, dtype=jnp.uint16)
    )
    code = jax.lax.bitcast_convert_type(q, jnp.uint16).astype(jnp.uint32)
    kept = jax.lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(16)
    return (code == kept).sum(), (code == kept + jnp.uint32(1)).sum()

  stayed, away = jax.lax.map(count, float32(word))
  np.testing.assert_array_equal(np.asarray(away), word & 0xFFFF)
  np.testing.assert_array_equal(np.asarray(stayed) + away, 2**16)


def test_fp16_counts_are_exact_where_at_most_16_bits_are_dropped():
  # 13 dropped bits for normals, 14, 15, 16 in the binades 2^-15 to 2^-17.
  rng = np.random.default_rng(1)
  words = [
    (e << 23) | int(m)
    for e in range(127 - 17, 127 + 15)
    for m in rng.integers(0, 0x7FE000, 2)
  ] + [(127 + 15) << 23 | 0x7FDFFF]
  u = (np.arange(2**16, dtype=np.uint32) << 16)[None]
  for sign in (0, 0x80000000):
    x = float32(np.array(words, np.uint32) | sign)[:, None]
    q = np.abs(np.asarray(round_fp16(x, u)).astype(np.float64))
    lower = GRID['float16'][
      np.searchsorted(GRID['float16'], np.abs(x[:, 0].astype(float)), 'right')
      - 1
    ]
    for word, row, low in zip(words, q, lower, strict=True):
      dropped, rest = fp16_shift_and_rest(word)
      assert dropped <= 16
      assert (row > low).sum() == rest * 2**16


def test_fp16_rounds_away_from_the_threshold_on_and_not_one_below():
  # Round away exactly where u >= 2^32 - floor(2^32 * fraction), any exponent
  # down to the smallest FP32 subnormal.
  rng = np.random.default_rng(2)
  words = [
    (e << 23) | int(m)
    for e in range(0, 127 + 15)
    for m in rng.integers(1, 0x7FE000, 5)
  ] + [1, 2, 0x007FFFFF]
  rest = [int(fp16_shift_and_rest(word)[1] * 2**32) for word in words]
  assert any(r == 0 for r in rest) and any(r % 2**16 for r in rest)
  x = float32(words)
  low = GRID['float16'][np.searchsorted(GRID['float16'], x, 'right') - 1]
  below = np.array([2**32 - max(r, 1) - 1 for r in rest], np.uint32)
  at = np.array([2**32 - max(r, 1) for r in rest], np.uint32)
  np.testing.assert_array_equal(round_fp16(x, below), low.astype(np.float16))
  moved = np.asarray(round_fp16(x, at)).astype(float) > low
  np.testing.assert_array_equal(moved, np.array(rest) > 0)


def test_every_upper_half_with_edge_lower_halves_agrees_with_numpy():
  noise = np.array([0, 1, 2, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF], np.uint32)
  for high in np.split(np.arange(2**16, dtype=np.uint32), 8):
    word = (high[:, None] << 16 | EDGES)[:, :, None]
    q = code(round_bf16(float32(word), noise.astype(np.uint16)[None, None]))
    magnitude = word.astype(np.int64) & 0x7FFFFFFF
    want = np.minimum((magnitude + noise) >> 16, 0x7F7F)  # saturates
    want = np.where(magnitude == 0x7F800000, 0x7F80, want)
    want = want | (word.astype(np.int64) >> 16 & 0x8000)
    nan = np.broadcast_to(magnitude > 0x7F800000, q.shape)
    np.testing.assert_array_equal(q[~nan], want[~nan])
    assert ((q[nan] & 0x7FFF) > 0x7F80).all()


@pytest.mark.parametrize('target', [BF16, FP16])
def test_every_value_of_the_grid_is_a_fixed_point_for_any_bits(target):
  values = ALL_BITS.view(target)
  x = np.asarray(values.astype(np.float32))
  rng = np.random.default_rng(3)
  if target == BF16:
    edge = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], np.uint16)
    draws = np.concatenate([edge, rng.integers(0, 2**16, 31, np.uint16)])
    q = jax.jit(sr_optax.round_with_bits)(x[:, None], draws[None])
  else:
    edge = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    draws = np.concatenate([edge, rng.integers(0, 2**32, 31, np.uint32)])
    q = round_fp16(x[:, None], draws[None])
  nan = np.isnan(x)
  np.testing.assert_array_equal(
    code(q)[~nan], np.broadcast_to(ALL_BITS[:, None], q.shape)[~nan]
  )
  assert np.isnan(np.asarray(q).astype(np.float32)[nan]).all()


@pytest.mark.parametrize('target', [BF16, FP16])
def test_every_nan_payload_stays_nan(target):
  # All 2^24 NaN words, with the draws that would carry the furthest.
  round_one = round_bf16 if target == BF16 else round_fp16
  dtype = np.uint16 if target == BF16 else np.uint32
  low = np.arange(2**16, dtype=np.uint32)
  for sign in (0, 0x8000):
    for high in np.split(np.arange(0x7F80, 0x8000, dtype=np.uint32), 8):
      word = ((high[:, None] | np.uint32(sign)) << 16 | low)[:, :, None]
      if high[0] == 0x7F80:
        word = np.where(word & 0x7FFFFFFF == 0x7F800000, word + 1, word)
      draws = np.array([0, np.iinfo(dtype).max], dtype)[None, None]
      q = code(round_one(float32(word), draws))
      magnitude = q & 0x7FFF
      assert (magnitude > (0x7F80 if target == BF16 else 0x7C00)).all()
      np.testing.assert_array_equal(q & 0x8000, np.broadcast_to(sign, q.shape))


@pytest.mark.parametrize('target', [BF16, FP16])
def test_inf_and_zeros_stay_and_the_largest_float32_stays_finite(target):
  round_one = round_bf16 if target == BF16 else round_fp16
  dtype = np.uint16 if target == BF16 else np.uint32
  draws = np.array([0, 1, np.iinfo(dtype).max], dtype)[None]
  inf, largest = (0x7F80, 0x7F7F) if target == BF16 else (0x7C00, 0x7BFF)
  x = [np.inf, -np.inf, 0.0, -0.0, np.finfo('f4').max, np.finfo('f4').min]
  want = [inf, inf | 0x8000, 0, 0x8000, largest, largest | 0x8000]
  q = code(round_one(np.array(x, np.float32)[:, None], draws))
  np.testing.assert_array_equal(q, np.broadcast_to(np.c_[want], q.shape))


def test_finite_values_beyond_the_fp16_range_saturate():
  x = np.array([65503.9, 65504, 65505, 65519.9, 65520, 65535, 1e6], np.float32)
  q = round_fp16(x, np.full(7, 2**32 - 1, np.uint32))
  np.testing.assert_array_equal(q, np.full(7, 65504, np.float16))


@pytest.mark.parametrize('target', [BF16, FP16])
def test_the_result_is_one_of_the_two_neighbours(target):
  # Without noise the neighbour below in magnitude, with the largest noise the
  # one above; found by search in the table of all grid values.
  rng = np.random.default_rng(4)
  word = np.concatenate(
    [
      rng.integers(0, 0x7F7F0000, 100_003, np.uint32),
      np.arange(127 - 30, 127 + 16, dtype=np.uint32) << 23,  # powers of two
      (np.arange(127 - 30, 127 + 16, dtype=np.uint32) << 23) + 1,
      (np.arange(127 - 30, 127 + 16, dtype=np.uint32) << 23) - 1,
      np.arange(1, 2000, dtype=np.uint32),
    ]
  )
  grid = GRID[jnp.dtype(target).name]
  x = float32(word)
  x = x[x.astype(float) <= grid[-1]]
  dtype = np.uint16 if target == BF16 else np.uint32
  ones = np.full(x.shape, np.iinfo(dtype).max, dtype)
  round_one = round_bf16 if target == BF16 else round_fp16
  for sign in (1, -1):
    low = np.asarray(round_one(sign * x, np.zeros_like(ones))).astype(float)
    high = np.asarray(round_one(sign * x, ones)).astype(float)
    i = np.searchsorted(grid, x.astype(float), 'right') - 1
    np.testing.assert_array_equal(sign * low, grid[i])
    above = np.where(
      grid[i] == x, grid[i], grid[np.minimum(i + 1, len(grid) - 1)]
    )
    if target == FP16:  # a fraction below 2^-32 of a step never rounds away
      above = np.where(
        (x.astype(float) - grid[i]) * 2**24 < 2**-32, grid[i], above
      )
    np.testing.assert_array_equal(sign * high, above)


@pytest.mark.parametrize('target', [BF16, FP16])
def test_rounding_is_monotone_in_x_and_symmetric_in_sign(target):
  # 4,001 consecutive FP32 words around every power of two, each with one draw.
  rng = np.random.default_rng(5)
  start = (np.arange(1, 255, dtype=np.int64) << 23)[:, None] - 2000
  word = (start + 53 * np.arange(4001)).astype(np.uint32)
  dtype = np.uint16 if target == BF16 else np.uint32
  u = rng.integers(0, np.iinfo(dtype).max, (254, 1), dtype, endpoint=True)
  round_one = round_bf16 if target == BF16 else round_fp16
  word = word[:, (word < 0x7F800000).all(0)]
  q = code(round_one(float32(word), u)).astype(np.int64)
  assert (np.diff(q, axis=1) >= 0).all()
  assert (np.diff(q, axis=1) > 0).any()
  mirrored = code(round_one(-float32(word), u))
  np.testing.assert_array_equal(mirrored, q | 0x8000)


@pytest.mark.parametrize(
  'target, name', [(BF16, ml_dtypes.bfloat16), (FP16, np.float16)]
)
def test_nearest_rounding_is_ieee_to_nearest_even_but_saturates(target, name):
  rng = np.random.default_rng(6)
  high = np.arange(0x7F80, dtype=np.uint32)[:, None]
  low = np.concatenate([EDGES, rng.integers(0, 2**16, 5, np.uint32)])
  word = (high << 16 | low).reshape(-1)
  # FP16 ties: 13 dropped bits, and those of its subnormals.
  ties = (np.arange(113, 142, dtype=np.uint32)[:, None] << 23) + (
    np.arange(1, 64, dtype=np.uint32) << 12
  )
  tiny = np.arange(1, 200, dtype=np.float32) * np.float32(2.0**-25)
  x = np.concatenate([float32(word), float32(ties.reshape(-1)), tiny])
  x = np.concatenate([x, -x])
  tx = sr_optax.nearest_rounding(dtype=target)
  got, _ = jax.jit(lambda x: sr_optax.init_from_shadow(tx, x))(x)
  with np.errstate(over='ignore'):
    want = x.astype(name)
  largest = GRID[jnp.dtype(target).name][-1]
  want = np.where(np.isinf(want), np.copysign(largest, x).astype(name), want)
  np.testing.assert_array_equal(code(got), code(want))


@pytest.mark.parametrize(
  'fraction', [2**-16, 2**-12, 2**-8, 0.3, 0.5, 1 - 2**-16]
)
def test_the_share_that_moves_is_the_fraction(fraction):
  n = 2**20 + 7
  dropped = round(fraction * 2**16)
  x = jnp.full((n,), float32(0x3F800000 + dropped))
  q = jax.jit(sr_optax.stochastic_round)(jax.random.key(11), x)
  p = dropped / 2**16
  # Binomial, 5 sigma.
  assert abs((np.asarray(q) > 1).sum() - n * p) < 5 * (n * p * (1 - p)) ** 0.5


def test_an_exact_value_never_moves():
  x = jnp.full((1_000_003,), 1.0, jnp.float32)
  q = jax.jit(sr_optax.stochastic_round)(jax.random.key(12), x)
  assert (np.asarray(q) == 1).all()


@pytest.mark.parametrize('target', [BF16, FP16])
def test_a_subnormal_rounds_to_its_mean(target):
  # 0.3 of the smallest subnormal: Bernoulli(0.3), 5 sigma.
  n = 100_003
  tiny = 2.0**-133 if target == BF16 else 2.0**-24
  word = np.float32(0.3 * tiny).view(np.uint32)
  x = jnp.full((n,), float32(word))
  q = jax.jit(lambda k, x: sr_optax.stochastic_round(k, x, target))(
    jax.random.key(13), x
  )
  assert set(np.unique(code(q))) == {0, 1}
  p = float(float32(word)) / tiny
  assert abs(code(q).sum() - n * p) < 5 * (n * p * (1 - p)) ** 0.5


@pytest.mark.parametrize('target', [BF16, FP16])
def test_eager_jit_and_scan_round_alike(target):
  rng = np.random.default_rng(7)
  x = rng.standard_normal((5, 7)).astype(np.float32)
  key = jax.random.key(14)

  def f(x):
    return sr_optax.stochastic_round(key, x, target)

  eager = code(f(jnp.asarray(x)))
  _, scanned = jax.lax.scan(lambda c, x: (c, f(x)), 0, jnp.stack([x, x, -x]))
  np.testing.assert_array_equal(eager, code(jax.jit(f)(x)))
  np.testing.assert_array_equal(eager, code(scanned)[1])
  np.testing.assert_array_equal(eager ^ 0x8000, code(scanned)[2])


def test_a_round_trip_inside_jit_is_not_elided():
  # XLA may drop float32 -> bfloat16 -> float32; the sum of q and x - q would
  # then be 0 everywhere.
  x = jnp.asarray(np.random.default_rng(8).standard_normal(101), jnp.float32)

  @jax.jit
  def error(x):
    q = sr_optax.stochastic_round(jax.random.key(15), x)
    return x - q.astype(jnp.float32)

  assert (np.asarray(error(x)) != 0).mean() > 0.9


def test_bits_broadcast_and_scalars_round():
  q = sr_optax.round_with_bits(jnp.float32(1.5), jnp.uint16(3))
  assert q.shape == () and q.dtype == BF16 and float(q) == 1.5
  bits = jnp.zeros((3, 5), jnp.uint16)
  assert sr_optax.round_with_bits(jnp.float32(1.5), bits).shape == (3, 5)


def test_a_bare_array_is_a_tree_with_the_empty_path():
  x = jnp.asarray(np.random.default_rng(9).standard_normal(1009), jnp.float32)
  key = jax.random.key(16)
  alone = sr_optax.stochastic_round(key, x)
  np.testing.assert_array_equal(
    code(alone), code(sr_optax.stochastic_round_tree(key, x))
  )
  named = sr_optax.stochastic_round_tree(key, {'': x, 'w': x})
  np.testing.assert_array_equal(code(alone), code(named['']))
  assert (code(alone) != code(named['w'])).mean() > 0.2


def test_other_leaves_of_a_tree_pass_through():
  tree = {
    'w': jnp.ones((2, 3), jnp.float32),
    'done': jnp.ones((3,), jnp.bfloat16),
    'step': jnp.arange(5),
    'mask': jnp.array([True, False]),
    'scalar': 3,
  }
  out = jax.jit(sr_optax.stochastic_round_tree)(jax.random.key(17), tree)
  assert out['w'].dtype == BF16 and out['done'].dtype == BF16
  assert out['step'].dtype == jnp.int32 and out['mask'].dtype == bool
  np.testing.assert_array_equal(out['step'], np.arange(5))
