"""The noise: frozen values, its structure, and its statistics.

The reference below is written from the papers, in Python integers: Threefry-
2x32-20 (Salmon et al. 2011), 64 bits of BLAKE2b, and the index permutation.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sr_optax
from sr_optax import noise

MASK = 2**32 - 1


def threefry(key, counter):
  """Threefry-2x32 with 20 rounds, as published."""
  rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
  k = [*key, 0x1BD11BDA ^ key[0] ^ key[1]]
  x, y = (counter[0] + k[0]) & MASK, (counter[1] + k[1]) & MASK
  for group in range(5):
    for r in rotations[group % 2]:
      x = (x + y) & MASK
      y = ((y << r | y >> (32 - r)) & MASK) ^ x
    x = (x + k[(group + 1) % 3]) & MASK
    y = (y + k[(group + 2) % 3] + group + 1) & MASK
  return x, y


def permute(x):
  x = ((x ^ x >> 16) * 0x21F0AAAD) & MASK
  x = ((x ^ x >> 15) * 0x735A2D97) & MASK
  return x ^ x >> 15


def reference_leaf_key(words, path):
  digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
  for part in (digest[:4], digest[4:]):
    words = threefry(words, (0, int.from_bytes(part, 'little')))
  return words


def reference_bits(words, path, index):
  """32 bits of one element; `words` is already folded with the epoch."""
  k0, k1 = reference_leaf_key(words, path)
  x = (index & MASK) * (k1 | 1) + k0 + permute(index >> 32)
  return permute(x & MASK)


@functools.partial(jax.jit, static_argnums=(1, 2))
def bits_of(words, path, shape):
  return noise.random_bits(noise.leaf_words(words, [path])[0], shape)


round_one = jax.jit(lambda key, x: sr_optax.stochastic_round(key, x))
round_tree = jax.jit(lambda key, x: sr_optax.stochastic_round_tree(key, x))


def words_of(seed, epoch=None):
  words = noise.key_words(jax.random.key(seed))
  return words if epoch is None else noise.fold(words, epoch)


def test_the_reference_threefry_has_the_published_answers():
  # Random123 1.09, kat_vectors, threefry2x32 20.
  assert threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
  assert threefry((MASK, MASK), (MASK, MASK)) == (0x1CB996FC, 0xBB002BE7)
  assert threefry((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (
    0xC4923A9C,
    0x483DF7A0,
  )


# (seed, epoch, path, index, noise word), frozen at 0.1.
GOLDEN = (
  (0, 0, '', 0, 0x32CBB579),
  (0, 0, '', 1, 0x315D65AB),
  (0, 0, '', 996, 0x2DEB9CA2),
  (0, 0, '', 4294967296, 0x60E23D08),
  (0, 0, 'w', 0, 0x7EEE5507),
  (0, 0, 'w', 1, 0xA4219166),
  (0, 0, 'w', 996, 0x6916A79E),
  (0, 0, 'w', 4294967297, 0xC6130791),
  (1, 0, 'w', 0, 0xB2A48A5E),
  (1, 0, 'w', 1, 0xA917B132),
  (1, 0, 'w', 996, 0x36D18DA5),
  (1, 0, 'w', 4294967298, 0x0A8A2F49),
  (0, 1, 'w', 0, 0x8BB791AA),
  (0, 1, 'w', 1, 0x77DE8AD4),
  (0, 1, 'w', 996, 0xDF532B00),
  (0, 1, 'w', 4294967299, 0x74193444),
  (2147483653, 4294967295, 'layers/0/attention/q/kernel', 0, 0x5CEB90F6),
  (2147483653, 4294967295, 'layers/0/attention/q/kernel', 1, 0xBC91C842),
  (2147483653, 4294967295, 'layers/0/attention/q/kernel', 996, 0x55736CA4),
  (2147483653, 4294967295, 'layers/0/attention/q/kernel', 65535, 0xE04552D0),
  (
    2147483653,
    4294967295,
    'layers/0/attention/q/kernel',
    2147495993,
    0x5780499B,
  ),
  (
    2147483653,
    4294967295,
    'layers/0/attention/q/kernel',
    4294967295,
    0xEF5FF0D0,
  ),
  (
    2147483653,
    4294967295,
    'layers/0/attention/q/kernel',
    4294967296,
    0x7E34F204,
  ),
  (
    2147483653,
    4294967295,
    'layers/0/attention/q/kernel',
    1100499282097,
    0x5C7D2F0F,
  ),
  (42, 7, 'layers/11/mlp/up/kernel', 0, 0x388E4080),
  (42, 7, 'layers/11/mlp/up/kernel', 1, 0x65F51891),
  (42, 7, 'layers/11/mlp/up/kernel', 996, 0xC0D6B4C0),
  (42, 7, 'layers/11/mlp/up/kernel', 65535, 0x34219652),
  (42, 7, 'layers/11/mlp/up/kernel', 2147495993, 0x072C857D),
  (42, 7, 'layers/11/mlp/up/kernel', 4294967295, 0x61EF7D22),
  (42, 7, 'layers/11/mlp/up/kernel', 4294967296, 0x1F168D98),
  (42, 7, 'layers/11/mlp/up/kernel', 1100499282097, 0xA904CE5F),
  (123456789, 1000000, 'embedding/ä', 0, 0x10F0FCD3),
  (123456789, 1000000, 'embedding/ä', 1, 0xCDDD6944),
  (123456789, 1000000, 'embedding/ä', 996, 0x1950C5E0),
  (123456789, 1000000, 'embedding/ä', 4294967302, 0xAE554BE5),
)


def test_golden_vectors_agree_with_the_reference():
  for seed, epoch, path, index, word in GOLDEN:
    words = threefry((0, seed), (0, epoch))
    assert reference_bits(words, path, index) == word


def test_golden_vectors_are_what_the_library_draws():
  for seed, epoch, path, index, word in GOLDEN:
    if index < 2**16:
      bits = bits_of(words_of(seed, epoch), path, (2**16,))
      assert int(bits[index]) == word


def test_bf16_weights_use_the_upper_16_of_the_golden_bits():
  # The shadow 1 + 2^-8 is half a step up, so it moves where the top bit is 1;
  # 1 + 65535 * 2^-23 stays only where the upper 16 bits are all 0.
  for seed, epoch, path, index, word in GOLDEN:
    if index >= 997:
      continue
    tree = {path: jnp.full((997,), 1 + 2.0**-8, jnp.float32)}
    q = round_tree(words_of(seed, epoch), tree)
    assert (q[path][index] > 1) == word >> 31
  words = words_of(5)
  x = 1 + np.arange(2**16, dtype=np.float32) * 2**-23
  q = round_one(words, x) > 1
  up = [
    (reference_bits((0, 5), '', i) >> 16) + i >= 2**16
    for i in range(0, 2**16, 251)
  ]
  np.testing.assert_array_equal(np.asarray(q)[::251], up)


def test_fp16_weights_use_all_32_bits():
  # 0x00FFFF00 / 2^32 of a step: with the lower 16 bits of the noise cut off,
  # 2^-16 of the draws would decide otherwise, 16 of these.
  words = words_of(6)
  n = 2**20
  x = np.full(n, 2.0**-24 * (0x00FFFF00 / 2**32), np.float32)
  q = sr_optax.stochastic_round(words, x, jnp.float16)
  k0, k1 = reference_leaf_key((0, 6), '')
  walk = np.arange(n, dtype=np.uint64) * np.uint64(k1 | 1) + np.uint64(k0)
  word = permute(walk & np.uint64(MASK))
  up = word + np.uint64(0x00FFFF00) >= 2**32
  cut = (word >> np.uint64(16) << np.uint64(16)) + np.uint64(0x00FFFF00)
  assert ((cut >= 2**32) != up).any()  # the test can tell
  np.testing.assert_array_equal(np.asarray(q) > 0, up)


def test_indices_beyond_32_bits_enter_with_their_high_word():
  # Slices of leaves that no machine here could hold: nothing is materialised.
  words = words_of(7, 3)
  w = (int(words[0]), int(words[1]))
  shapes = {
    (70_001, 70_003): [(0, 0), (61_355, 5_821), (70_000, 69_990)],
    (2_503, 1_999, 1_009): [(0, 0, 5), (2_502, 1_998, 1_000), (1_901, 3, 9)],
    (11, 2**31 - 1): [(1, 0), (2, 1), (3, 2**31 - 12), (10, 2**31 - 11)],
  }
  for shape, starts in shapes.items():
    for start in starts:
      size = (1,) * (len(shape) - 1) + (7,)

      @jax.jit
      def piece(start=start, size=size, shape=shape):
        bits = noise.random_bits(noise.leaf_words(words, ['big'])[0], shape)
        stop = [a + b for a, b in zip(start, size, strict=True)]
        return jax.lax.slice(bits, start, stop)

      assert piece.lower().compile().memory_analysis().temp_size_in_bytes < 1e4
      first = 0
      for i, n in zip(start, shape, strict=True):
        first = first * n + i
      want = [reference_bits(w, 'big', first + j) for j in range(7)]
      np.testing.assert_array_equal(piece().reshape(-1), want)


def test_the_high_word_of_the_index_changes_the_noise():
  # Elements 2^32 apart: without the high word they would share their noise.
  key = noise.leaf_words(words_of(8), ['big'])[0]
  n = 2**31 - 1

  @jax.jit
  def pieces():
    bits = noise.random_bits(key, (3, n))
    return bits[0, :97], bits[2, 2:99]  # 2 n + 2 = 2^32

  a, b = pieces()
  assert (np.asarray(a) != np.asarray(b)).all()


def test_the_noise_follows_the_row_major_index_whatever_the_shape():
  words = words_of(9)
  flat = np.asarray(bits_of(words, 'w', (2310,)))
  for shape in [(2310, 1), (2, 3, 5, 7, 11), (11, 210), (1, 2310)]:
    np.testing.assert_array_equal(
      np.asarray(bits_of(words, 'w', shape)).reshape(-1), flat
    )
  assert bits_of(words, 'w', ()) == flat[0]
  assert bits_of(words, 'w', (0, 5)).shape == (0, 5)


def test_typed_and_raw_keys_of_one_seed_draw_alike():
  x = jnp.linspace(-1, 1, 101, dtype=jnp.float32)
  a = round_one(jax.random.key(10), x)
  b = round_one(jax.random.PRNGKey(10), x)
  c = round_one(np.array([0, 10], np.uint32), x)
  np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize('impl', ['rbg', 'unsafe_rbg'])
def test_keys_of_four_words_enter_whole(impl):
  # Folded into two words by Threefry, so that each of the four matters.
  for data in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 4, 4], [0, 2, 3, 4]):
    key = jax.random.wrap_key_data(jnp.array(data, jnp.uint32), impl=impl)
    want = threefry(threefry(data[:2], (0, data[2])), (0, data[3]))
    np.testing.assert_array_equal(noise.key_words(key), want)


def test_vmap_over_keys_is_the_loop_over_keys():
  x = jnp.linspace(-1, 1, 101, dtype=jnp.float32)
  keys = jax.random.split(jax.random.key(11), 3)
  all_at_once = jax.jit(jax.vmap(sr_optax.stochastic_round, (0, None)))(keys, x)
  for key, row in zip(keys, all_at_once, strict=True):
    np.testing.assert_array_equal(row, round_one(key, x))
  assert (np.asarray(all_at_once[0]) != np.asarray(all_at_once[1])).any()


def test_vmap_over_an_ensemble_of_weights_is_the_loop_over_members():
  x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 101)), 'f4')
  keys = jax.random.split(jax.random.key(12), 3)
  q = jax.jit(jax.vmap(sr_optax.stochastic_round))(keys, x)
  for i in range(3):
    np.testing.assert_array_equal(q[i], round_one(keys[i], x[i]))


# --- statistics -------------------------------------------------------------
# 16 bits a draw, as BF16 uses them. All seeds are fixed, so a test either
# always passes or always fails; bounds are 5 sigma unless said otherwise.


def draws(seed, epoch, path, n):
  return np.asarray(bits_of(words_of(seed, epoch), path, (n,))) >> 16


@jax.jit
def draws_over_steps(seed_words):
  def one(epoch):
    key = noise.leaf_words(noise.fold(seed_words, epoch), ['w'])[0]
    return noise.random_bits(key, (5,))[3]

  return jax.lax.map(one, jnp.arange(2**19, dtype=jnp.uint32), batch_size=2**15)


def draws_over_leaves(seed, n):
  hashes = noise.path_hashes([f'layers/{i}/kernel' for i in range(n)])

  @jax.jit
  def one(h):
    words = words_of(seed, 0)
    leaf_key = noise.fold(noise.fold(words, h[0]), h[1])
    return noise.random_bits(leaf_key, (5,))[3]

  return np.asarray(jax.lax.map(one, hashes, batch_size=2**15)) >> 16


STREAMS = {
  'index': lambda: draws(20, 0, 'w', 2**20),
  'step': lambda: np.asarray(draws_over_steps(words_of(21))) >> 16,
  'leaf': lambda: draws_over_leaves(22, 2**18),
}


@pytest.fixture(scope='module', params=list(STREAMS))
def stream(request):
  return STREAMS[request.param]()


def test_values_are_uniform(stream):
  # Chi-square over as many cells as leave 16 draws a cell: mean k - 1,
  # variance 2 (k - 1). Also not too even.
  cells = min(2**16, len(stream) // 16)
  counts = np.bincount(stream * cells // 2**16, minlength=cells)
  expected = len(stream) / cells
  chi2 = ((counts - expected) ** 2 / expected).sum()
  assert abs(chi2 - (cells - 1)) < 5 * (2 * (cells - 1)) ** 0.5


def test_every_bit_is_one_half_of_the_time(stream):
  for bit in range(16):
    ones = (stream >> bit & 1).sum()
    assert abs(ones - len(stream) / 2) < 5 * len(stream) ** 0.5 / 2


def test_neighbours_in_a_stream_are_uncorrelated(stream):
  # A correlation coefficient of n independent pairs has sigma 1 / sqrt(n).
  # Lags: neighbours, powers of two (rows of a matrix), and odd row lengths.
  x = stream / 2**16 - 0.5
  for lag in (1, 2, 3, 4, 7, 8, 16, 64, 127, 128, 768, 1024, 4096, 16384):
    r = (x[:-lag] * x[lag:]).mean() * 12
    assert abs(r) < 5 / (len(x) - lag) ** 0.5, lag


def test_bits_of_neighbours_are_uncorrelated(stream):
  # All 256 pairs of bits of consecutive draws; 6 sigma for 256 comparisons.
  x = (stream[:, None] >> np.arange(16) & 1) * 2.0 - 1
  r = x[:-1].astype(np.float32).T @ x[1:].astype(np.float32) / (len(x) - 1)
  assert np.abs(r).max() < 6 / (len(x) - 1) ** 0.5


def test_pairs_of_neighbours_fill_the_square(stream):
  # Serial test: chi-square over 64 x 64 cells of disjoint pairs.
  pair = (stream[0::2] >> 10) * 64 + (stream[1::2] >> 10)
  counts = np.bincount(pair, minlength=4096)
  expected = len(pair) / 4096
  chi2 = ((counts - expected) ** 2 / expected).sum()
  assert abs(chi2 - 4095) < 5 * (2 * 4095) ** 0.5


def test_leaves_steps_and_keys_are_uncorrelated():
  n = 2**18
  columns = {
    'base': draws(30, 0, 'layers/0/q/kernel', n),
    'next step': draws(30, 1, 'layers/0/q/kernel', n),
    'next leaf': draws(30, 0, 'layers/1/q/kernel', n),
    'sibling': draws(30, 0, 'layers/0/k/kernel', n),
    'next key': draws(31, 0, 'layers/0/q/kernel', n),
    'far step': draws(30, 2**20, 'layers/0/q/kernel', n),
  }
  x = np.stack(list(columns.values())) / 2**16 - 0.5
  r = x @ x.T * 12 / n
  off = r[~np.eye(len(columns), dtype=bool)]
  assert np.abs(off).max() < 5 / n**0.5
  # Also shifted against one another: shared noise at an offset.
  for lag in (1, 2, 128):
    r = x[:, :-lag] @ x[:, lag:].T * 12 / (n - lag)
    assert np.abs(r).max() < 5.5 / (n - lag) ** 0.5


def test_leaves_repeat_each_others_words_as_often_as_chance_and_no_more():
  # 32-bit words of 1,024 leaves of 8,192: N^2 / 2^33 = 8,192 coincidences,
  # Poisson, 5 sigma. Leaves that walk along one common sequence from different
  # origins share whole stretches or nothing: half as many, or many more.
  leaves, n = 1024, 2**13
  hashes = noise.path_hashes([f'layers/{i}/kernel' for i in range(leaves)])

  @jax.jit
  def words(h):
    key = noise.fold(noise.fold(words_of(35, 0), h[0]), h[1])
    return noise.random_bits(key, (n,))

  x = np.sort(np.asarray(jax.lax.map(words, hashes, batch_size=64)).reshape(-1))
  repeats = (x[1:] == x[:-1]).sum()
  expected = (leaves * n) ** 2 / 2**33
  assert abs(repeats - expected) < 5 * expected**0.5


def test_blocks_of_2_to_the_32_elements_share_no_words():
  # Not the noise of the block before, moved by a few elements: the reference
  # (which the library equals beyond 2^32 elements) has no word twice in 128
  # elements of each of 8 blocks; by chance 1024^2 / 2^33 = 0.0001.
  words = [
    reference_bits((3, 4), 'big', (block << 32) + i)
    for block in range(8)
    for i in range(128)
  ]
  assert len(set(words)) == len(words)


def test_equal_leaves_round_differently():
  x = jnp.full((1009,), 1 + 2.0**-8, jnp.float32)
  q = round_tree(jax.random.key(32), {'a': x, 'b': x})
  # Half of 1,009 coins differ, sigma sqrt(1009) / 2 = 16.
  differ = (np.asarray(q['a']) != np.asarray(q['b'])).sum()
  assert abs(differ - 504.5) < 5 * 15.9


def test_one_bit_of_the_index_or_the_key_flips_half_of_the_output():
  # Over 4,096 indices, each output bit flips with p = 1/2: 6 sigma for the
  # 1,024 pairs of an input and an output bit, sigma = 1 / (2 * 64). The
  # permutation is a fixed one, so allow its published bias on top, 1/512.
  draw = jax.jit(
    lambda words: noise.random_bits(noise.leaf_words(words, ['w'])[0], (2**13,))
  )
  words = np.array([0, 33], np.uint32)
  base = np.asarray(draw(words))
  index = np.arange(2**13)
  flips = [base ^ base[index ^ 1 << bit] for bit in range(13)]
  for bit in range(64):
    other = words.copy()
    other[bit // 32] ^= np.uint32(1 << bit % 32)
    flips.append(base ^ np.asarray(draw(other)))
  for one in flips:
    share = (one[:, None] >> np.arange(16, 32) & 1).mean(0)
    assert np.abs(share - 0.5).max() < 6 / 128 + 1 / 512


def test_consecutive_steps_of_a_weight_average_out():
  # Mean noise of one element over 2^19 steps: uniform, sigma 1 / sqrt(12 n).
  x = (np.asarray(draws_over_steps(words_of(34))) >> 16) / 2**16
  assert abs(x.mean() - 0.5) < 5 / (12 * len(x)) ** 0.5
