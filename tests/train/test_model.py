import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train import model as model_lib
from train.model import Decoder, ModelConfig, init_cache, unstack

# Distinct sizes without common factors where the model allows it, so that a
# swapped axis cannot pass.
CONFIG = ModelConfig(
  vocab_size=37,
  width=17,
  layers=3,
  heads=6,
  kv_heads=2,
  head_width=10,
  ff_width=23,
  context=64,
  rope_theta=100.0,
  rms_eps=1e-5,
  tied_embeddings=False,
  qkv_bias=True,
  qk_norm=True,
)
PROMPTS, GROUP, PREFIX, TIME = 3, 5, 7, 4
BATCH = PROMPTS * GROUP
PROMPT_LENGTHS = np.array([7, 1, 4])

# A unit in the last place of float32 is 1.2e-7 relative. About 20 roundings
# and sums of at most 60 terms per layer, three layers, errors adding like a
# random walk: sqrt(3 * 20 * 60) * 6e-8 = 4e-6 of the largest value.
RTOL = 4e-6


def make(config, seed=0, dtype=jnp.float32):
  """A decoder with all parameters random, none at a neutral value."""
  graph, shapes = nnx.split(
    nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
  )
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = [str(getattr(entry, 'key', '')) for entry in path]
    name = [entry for entry in name if entry][-1]
    values = rng.normal(size=leaf.shape)
    if 'norm' in name:
      values = 1 + 0.3 * values
    elif 'bias' in name:
      values = 0.5 * values
    elif name == 'o':
      values = values / np.sqrt(config.heads * config.head_width)
    elif name == 'down':
      values = values / np.sqrt(config.ff_width)
    elif name != 'embed':
      values = values / np.sqrt(config.width)
    return jnp.asarray(values, dtype)

  return graph, jax.tree_util.tree_map_with_path(draw, shapes)


@functools.partial(jax.jit, static_argnames=('graph', 'dtype', 'remat'))
def forward(graph, params, *args, dtype=jnp.float32, remat=False):
  return nnx.merge(graph, params)(*args, compute_dtype=dtype, remat=remat)


@functools.partial(jax.jit, static_argnames=('graph', 'dtype'))
def prefill(graph, params, tokens, dtype=jnp.float32):
  return nnx.merge(graph, params).prefill(tokens, compute_dtype=dtype)


@functools.partial(jax.jit, static_argnames=('graph', 'dtype'))
def logits(graph, params, hidden, dtype=jnp.float32):
  return nnx.merge(graph, params).logits(hidden, compute_dtype=dtype)


def padded(lengths, time, seed):
  """Random tokens of right-padded rows, the padding too, and the lengths."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, CONFIG.vocab_size, (len(lengths), time))
  return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


def real(rows):
  """Which of the tokens of padded rows are no padding: bool."""
  tokens, lengths = rows
  return np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]


def grouped(seed=0):
  """Prompts of unequal length, and completions that continue them."""
  lengths = np.random.default_rng(seed).integers(1, TIME + 1, BATCH)
  lengths[0] = TIME
  return (
    padded(PROMPT_LENGTHS, PREFIX, seed),
    padded(lengths, TIME, seed + 1),
  )


def concatenated(prompts, completions):
  """The same sequences, right-padded, with the completions' slots in them."""
  lengths = np.repeat(PROMPT_LENGTHS, GROUP)
  own = np.asarray(completions[1])
  tokens, both = padded(lengths + own, PREFIX + TIME, 99)
  slots = lengths[:, None] + np.arange(TIME)
  tokens = np.array(tokens)
  for row in range(BATCH):
    length = lengths[row]
    tokens[row, :length] = prompts[0][row // GROUP, :length]
    tokens[row, slots[row, : own[row]]] = completions[0][row, : own[row]]
  return (jnp.asarray(tokens), both), slots


def close(actual, expected, rtol=RTOL):
  expected = np.asarray(expected, np.float64)
  np.testing.assert_allclose(
    np.asarray(actual, np.float64),
    expected,
    rtol=0,
    atol=rtol * np.abs(expected).max(),
  )


def numpy_logits(config, params, tokens, length):
  """Independent float64 decoder of one sequence: `[length, V]`."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  heads, half = config.heads, config.head_width // 2

  def norm(x, weight):
    return x / np.sqrt((x * x).mean() + config.rms_eps) * weight

  def rope(x, position):
    out = np.empty_like(x)
    for i in range(half):
      angle = position * config.rope_theta ** (-2 * i / config.head_width)
      pair = complex(x[i], x[i + half]) * np.exp(1j * angle)
      out[i], out[i + half] = pair.real, pair.imag
    return out

  x = [p['embed'][int(token)] for token in tokens[:length]]
  for layer in range(config.layers):
    w = {name: leaf[layer] for name, leaf in p['blocks'].items()}
    q, k, v = [], [], []
    for t in range(length):
      y = norm(x[t], w['attention_norm'])
      row = {}
      for name in 'qkv':
        row[name] = np.tensordot(y, w[name], 1)
        if config.qkv_bias:
          row[name] = row[name] + w[f'{name}_bias']
        if config.qk_norm and name != 'v':
          row[name] = [norm(h, w[f'{name}_norm']) for h in row[name]]
      q.append([rope(h, t) for h in row['q']])
      k.append([rope(h, t) for h in row['k']])
      v.append(row['v'])
    for t in range(length):
      for n in range(heads):
        shared = n // (heads // config.kv_heads)
        scores = np.array([q[t][n] @ k[s][shared] for s in range(t + 1)])
        weights = np.exp(scores / np.sqrt(config.head_width))
        weights /= weights.sum()
        mixed = sum(weights[s] * v[s][shared] for s in range(t + 1))
        x[t] = x[t] + mixed @ w['o'][n]
      y = norm(x[t], w['mlp_norm'])
      gate = y @ w['gate']
      x[t] = x[t] + (gate / (1 + np.exp(-gate)) * (y @ w['up'])) @ w['down']
  head = p['embed'].T if config.tied_embeddings else p['head']
  return np.stack([norm(row, p['norm']) @ head for row in x])


@pytest.mark.parametrize(
  'bias, qk_norm, tied', list(itertools.product([False, True], repeat=3))
)
def test_logits_equal_a_numpy_decoder(bias, qk_norm, tied):
  config = dataclasses.replace(
    CONFIG, qkv_bias=bias, qk_norm=qk_norm, tied_embeddings=tied
  )
  graph, params = make(config)
  prompts = padded([6, 2], 6, 0)
  completions = padded([5, 3, 4, 5], 5, 1)
  mine, theirs = forward(graph, params, *prompts, completions[0])
  mine, theirs = logits(graph, params, mine), logits(graph, params, theirs)
  assert mine.dtype == theirs.dtype == jnp.float32
  for row, own in enumerate(completions[1]):
    length = int(prompts[1][row // 2])
    tokens = [*prompts[0][row // 2, :length], *completions[0][row, :own]]
    expected = numpy_logits(
      config, nnx.to_pure_dict(params), tokens, len(tokens)
    )
    close(mine[row // 2, :length], expected[:length])
    close(theirs[row, :own], expected[length:])


def test_parameters_have_the_documented_names_and_shapes():
  c, (_, params) = CONFIG, make(CONFIG)
  layers, width, heads, kv = c.layers, c.width, c.heads, c.kv_heads
  assert jax.tree.map(jnp.shape, nnx.to_pure_dict(params)) == {
    'embed': (c.vocab_size, width),
    'norm': (width,),
    'head': (width, c.vocab_size),
    'blocks': {
      'attention_norm': (layers, width),
      'q': (layers, width, heads, c.head_width),
      'k': (layers, width, kv, c.head_width),
      'v': (layers, width, kv, c.head_width),
      'o': (layers, heads, c.head_width, width),
      'q_bias': (layers, heads, c.head_width),
      'k_bias': (layers, kv, c.head_width),
      'v_bias': (layers, kv, c.head_width),
      'q_norm': (layers, c.head_width),
      'k_norm': (layers, c.head_width),
      'mlp_norm': (layers, width),
      'gate': (layers, width, c.ff_width),
      'up': (layers, width, c.ff_width),
      'down': (layers, c.ff_width, width),
    },
  }


def test_initial_values_have_the_documented_spread():
  rngs = nnx.Rngs(jax.random.key(3, impl='rbg'))  # compiles fast
  params = nnx.to_pure_dict(nnx.state(Decoder(CONFIG, rngs=rngs)))
  blocks = params['blocks']
  small = 0.02 / np.sqrt(2 * CONFIG.layers)
  for leaf, stddev in [
    (params['embed'], 0.02),
    (params['head'], 0.02),
    (blocks['q'], 0.02),
    (blocks['o'], small),
    (blocks['up'], 0.02),
    (blocks['down'], small),
  ]:
    # The deviation of n samples is known to 1 / sqrt(2 n), here 5 sigma.
    assert abs(np.std(leaf) / stddev - 1) < 5 / np.sqrt(2 * leaf.size)
  assert np.all(blocks['mlp_norm'] == 1) and np.all(params['norm'] == 1)
  assert np.all(blocks['k_bias'] == 0)


def test_no_hidden_state_depends_on_a_later_token_or_another_completion():
  graph, params = make(CONFIG)
  length, group, time = 3, 2, 4
  count = length + group * time
  tokens = jnp.arange(count, dtype=jnp.int32)  # every token another one
  prompts = tokens[None, :length], jnp.array([length])
  completions = tokens[length:].reshape(group, time)

  @jax.jit
  @jax.jacrev
  def jacobian(params):
    mine, theirs = nnx.merge(graph, params)(*prompts, completions)
    return jnp.concatenate([mine[0], *theirs]).sum(axis=1)

  by_token = jacobian(params)['embed'][...][:, :count]  # [T, token, D]
  influence = np.abs(by_token).max(axis=2)
  seen = np.tril(np.ones((count, count), bool))
  seen[length + time :, length : length + time] = False
  assert np.all(influence[~seen] == 0)
  assert np.all(influence[seen] > 1e-6)


@pytest.mark.parametrize('chunk', [1, 2, TIME])
def test_cached_decoding_equals_the_full_forward(chunk):
  graph, params = make(CONFIG)
  prompts, completions = grouped()
  full, slots = concatenated(prompts, completions)
  expected, key_values = prefill(graph, params, full[0])
  _, prefix = prefill(graph, params, prompts[0])

  @jax.jit
  def decode(params, prefix):
    model = nnx.merge(graph, params)
    weights = model.layer_wise(jnp.float32)

    def step(cache, index):
      def part(x):
        return jax.lax.dynamic_slice_in_dim(x, index, chunk, axis=1)

      hidden, cache = model.decode(
        weights,
        part(completions[0]),
        part(jnp.asarray(slots)),
        cache,
        index,
        prefix=unstack(prefix),
        lengths=prompts[1],
      )
      return cache, hidden

    cache = init_cache(CONFIG, BATCH, TIME + 3, jnp.float32)
    return jax.lax.scan(step, cache, jnp.arange(0, TIME, chunk))

  cache, hidden = decode(params, prefix)
  hidden = np.moveaxis(hidden, 0, 1).reshape(BATCH, TIME, CONFIG.width)
  assert all(np.all(layer.k[..., TIME:] == 0) for layer in cache)
  assert all(np.all(layer.v[:, :, TIME:] == 0) for layer in cache)
  for row, t in np.argwhere(real(completions)):
    close(hidden[row, t], expected[row, slots[row, t]])
  mask = real(completions)[:, None, None]
  for layer, whole in zip(cache, unstack(key_values), strict=True):
    for actual, both in (
      (layer.k[..., :TIME], whole.k),
      (np.swapaxes(layer.v[:, :, :TIME], 2, 3), np.swapaxes(whole.v, 2, 3)),
    ):
      own = np.take_along_axis(np.asarray(both), slots[:, None, None], axis=3)
      close(np.where(mask, actual, 0), np.where(mask, own, 0))


@pytest.mark.parametrize('remat', [False, True])
@pytest.mark.parametrize('queries', [None, 3])
def test_no_shared_prompt_block_or_remat_changes_states_or_gradients(
  monkeypatch, queries, remat
):
  graph, params = make(CONFIG)
  prompts, completions = grouped()
  full, slots = concatenated(prompts, completions)
  rows = np.arange(BATCH)[:, None]
  valid = real(completions)
  rng = np.random.default_rng(5)
  weight = rng.normal(size=(BATCH, TIME, CONFIG.width))
  weight = jnp.asarray(weight * valid[..., None], jnp.float32)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def shared(params):
    model = nnx.merge(graph, params)
    _, hidden = model(*prompts, completions[0], remat=remat)
    return jnp.sum(hidden * weight), hidden

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def unshared(params):
    hidden = nnx.merge(graph, params).prefill(full[0])[0][rows, slots]
    return jnp.sum(hidden * weight), hidden

  (_, expected), gradient_full = unshared(params)
  if queries:  # PREFIX and TIME are no multiples
    monkeypatch.setattr(model_lib, '_QUERIES', queries)
  (_, actual), gradient = shared(params)
  close(np.asarray(actual)[valid], np.asarray(expected)[valid])
  # Forward and backward, and sums over 60 tokens: 3 times RTOL. The gradient
  # of a key bias nearly cancels (softmax ignores what all keys share), so its
  # error is measured at the size of the terms, which is 1 or more.
  for leaf, full_leaf in zip(
    jax.tree.leaves(gradient), jax.tree.leaves(gradient_full), strict=True
  ):
    atol = 3 * RTOL * max(np.abs(full_leaf).max(), 1.0)
    np.testing.assert_allclose(leaf, full_leaf, rtol=0, atol=atol)
  # `head` has no part in hidden states; everything else must have been tested.
  used = {**nnx.to_pure_dict(gradient)}
  assert np.all(used.pop('head') == 0)
  assert all(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(used))


def test_the_prefix_is_not_tiled_over_its_group():
  graph, params = make(CONFIG)
  prompts, completions = grouped()

  def run(params):
    return nnx.merge(graph, params)(*prompts, completions[0])

  text = str(jax.make_jaxpr(run)(params))
  kv_heads, width = CONFIG.kv_heads, CONFIG.head_width
  for shape in ((kv_heads, width, PREFIX), (kv_heads, PREFIX, width)):
    kv = ','.join(map(str, shape)) + ']'
    assert f'f32[{PROMPTS},{kv}' in text
    assert f'f32[{BATCH},{kv}' not in text
    assert f'f32[{PROMPTS},{GROUP},{kv}' not in text


def test_what_stands_in_the_padding_changes_nothing():
  graph, params = make(CONFIG)
  prompts, completions = grouped()
  results = []
  for pad in (0, 31):
    p, c = (
      (jnp.where(real(x), x[0], pad), x[1]) for x in (prompts, completions)
    )
    mine, theirs = forward(graph, params, *p, c[0])
    results.append((mine[real(p)], theirs[real(c)]))
  for first, second in zip(*results, strict=True):
    np.testing.assert_array_equal(first, second)


def test_padded_rows_stay_finite_and_so_do_their_gradients():
  graph, params = make(CONFIG)
  prompts, completions = padded([3, 0], 5, 2), padded([0, 2, 4, 1], 4, 3)

  @jax.jit
  def gradient(params):
    def loss(params):
      model = nnx.merge(graph, params)
      hidden = model(*prompts, completions[0])
      return sum(
        jnp.sum(jnp.where(real(rows)[..., None], x, 0.0))
        for rows, x in zip((prompts, completions), hidden, strict=True)
      )

    return jax.value_and_grad(loss)(params)

  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient(params)))


def test_completions_without_tokens_leave_their_prompts_as_they_are():
  graph, params = make(CONFIG)
  prompts, _ = grouped()
  nothing = jnp.zeros((BATCH, 0), jnp.int32)
  mine, theirs = forward(graph, params, *prompts, nothing)
  assert theirs.shape == (BATCH, 0, CONFIG.width)
  expected, _ = prefill(graph, params, prompts[0])
  close(mine[real(prompts)], expected[real(prompts)])


def test_permuting_the_batch_permutes_the_result():
  graph, params = make(CONFIG)
  prompts, completions = grouped()
  rng = np.random.default_rng(8)
  order = rng.permutation(PROMPTS)
  within = [rng.permutation(GROUP) for _ in range(PROMPTS)]
  rows = np.concatenate(
    [p * GROUP + inner for p, inner in zip(order, within, strict=True)]
  )

  expected = forward(graph, params, *prompts, completions[0])
  actual = forward(
    graph, params, *(x[order] for x in prompts), completions[0][rows]
  )
  close(actual[0], expected[0][order])
  close(actual[1], expected[1][rows])


def test_bfloat16_compute_stays_close_to_float32():
  graph, params = make(CONFIG, dtype=jnp.bfloat16)
  prompts = padded([11, 5], 11, 0)
  completions = padded([6, 6, 2, 4], 6, 1)
  exact = forward(graph, params, *prompts, completions[0])
  coarse = forward(graph, params, *prompts, completions[0], dtype=jnp.bfloat16)
  _, kept = prefill(graph, params, prompts[0], dtype=jnp.bfloat16)
  assert kept.k.dtype == kept.v.dtype == jnp.bfloat16
  for rows, wide, narrow in zip(
    (prompts, completions), exact, coarse, strict=True
  ):
    assert narrow.dtype == jnp.bfloat16
    assert logits(graph, params, narrow, jnp.bfloat16).dtype == jnp.float32
    wide = np.asarray(wide, np.float64)[real(rows)]
    error = np.asarray(narrow, np.float64)[real(rows)] - wide
    # About 12 roundings of 2^-9 per layer: sqrt(3 * 12) * 2^-9 = 1.2 %; times
    # 3.
    assert 0 < np.linalg.norm(error) / np.linalg.norm(wide) < 0.036


def test_bfloat16_weights_computed_in_float32_lose_nothing():
  graph, params = make(CONFIG, dtype=jnp.bfloat16)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  prompts, completions = grouped()
  actual = forward(graph, params, *prompts, completions[0])
  expected = forward(graph, wide, *prompts, completions[0])
  for x, y in zip(actual, expected, strict=True):
    close(x, y, rtol=2e-6)


def test_positions_beyond_256_are_exact_in_bfloat16_compute():
  config = dataclasses.replace(CONFIG, rope_theta=1e4, context=8192)
  graph, params = make(config, dtype=jnp.bfloat16)
  positions = np.array([0, 255, 257, 1001])
  tokens = jnp.full((1, 1002), 3, jnp.int32)
  _, kept = prefill(graph, params, tokens, dtype=jnp.bfloat16)
  # In the first layer the key of a token depends on nothing but its position,
  # and at position 0 it is not rotated.
  keys = np.asarray(kept.k[0, 0], np.float64)[..., positions]  # [K, H, 4]
  keys = np.moveaxis(keys, 2, 0)
  half = config.head_width // 2
  pairs = keys[..., :half] + 1j * keys[..., half:]
  frequency = config.rope_theta ** (-np.arange(half) / half)
  turn = np.exp(1j * positions[:, None] * frequency)
  expected = pairs[0] * turn[:, None]
  error = np.abs(pairs - expected) / np.abs(expected)
  # One rounding to bfloat16, and float32 angles up to 1001 radians. A
  # position that is off by one turns the first pair by one radian.
  assert error.max() < 2**-8


def test_positions_of_completions_are_those_behind_their_prompt():
  """Also where bfloat16 could not tell them apart."""
  config = dataclasses.replace(CONFIG, rope_theta=1e4, context=8192)
  graph, params = make(config)
  tokens, lengths = padded([300, 257], 300, 0)
  completions, _ = padded([5] * 4, 5, 1)
  _, theirs = forward(graph, params, tokens, lengths, completions)
  for row in range(4):
    length = int(lengths[row // 2])
    whole = jnp.concatenate([tokens[row // 2, :length], completions[row]])
    alone, _ = prefill(graph, params, whole[None])
    # Sums over 300 keys instead of 60; a position rounded to bfloat16 is off
    # by up to one, 1e-2 and more here.
    close(theirs[row], alone[0, length:], rtol=1e-4)


def test_a_7b_model_is_described_without_allocating_it():
  config = ModelConfig(  # Qwen2.5-7B
    vocab_size=152064,
    width=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_width=128,
    ff_width=18944,
    context=32768,
    rope_theta=1e6,
    rms_eps=1e-6,
    tied_embeddings=False,
    qkv_bias=True,
  )
  model = nnx.eval_shape(
    lambda: Decoder(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  )
  graph, params = nnx.split(model)
  leaves = jax.tree.leaves(params)
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
  assert sum(leaf.size for leaf in leaves) == 7_615_616_512  # as published

  prompts = (
    jax.ShapeDtypeStruct((2, 11), jnp.int32),
    jax.ShapeDtypeStruct((2,), jnp.int32),
  )
  completions = jax.ShapeDtypeStruct((6, 5), jnp.int32)
  run = functools.partial(forward, graph, dtype=jnp.bfloat16)
  mine, theirs = jax.eval_shape(run, params, *prompts, completions)
  assert mine.shape == (2, 11, 3584) and theirs.shape == (6, 5, 3584)
  run = functools.partial(prefill, graph, dtype=jnp.bfloat16)
  _, kept = jax.eval_shape(run, params, prompts[0])
  assert kept.k.shape == (28, 2, 4, 128, 11)
  assert kept.v.shape == (28, 2, 4, 11, 128)


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(kv_heads=4), 'multiple of kv_heads, got 6 and 4'),
    (dict(head_width=5), 'head_width must be even, got 5'),
    (dict(layers=0), 'layers must be positive, got 0'),
    (dict(rope_theta=-1.0), 'rope_theta must be positive'),
    (dict(rms_eps=float('nan')), 'rms_eps must be positive'),
  ],
)
def test_impossible_sizes_are_errors(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)


def test_incomplete_groups_are_errors():
  graph, params = make(CONFIG)
  prompts, completions = grouped()
  with pytest.raises(ValueError, match='4 is not a multiple of 3 prompts'):
    forward(graph, params, *prompts, completions[0][:4])

  def decode(params):
    model = nnx.merge(graph, params)
    weights = model.layer_wise(jnp.float32)
    _, prefix = model.prefill(prompts[0])
    cache = init_cache(CONFIG, 4, 1, jnp.float32)
    first = completions[0][:4, :1]
    rest = dict(prefix=unstack(prefix), lengths=prompts[1])
    return model.decode(weights, first, first, cache, 0, **rest)

  with pytest.raises(ValueError, match='4 is not a multiple of 3 prompts'):
    jax.eval_shape(decode, params)


def test_the_module_states_the_shape_legend():
  for letter in 'BTSPGDFNKHLV':
    assert f' {letter}  ' in model_lib.__doc__
