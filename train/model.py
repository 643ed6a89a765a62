"""One decoder for the Llama, Qwen2 and Qwen3 families.

The keys and values of a prompt are computed once and shared by the
completions of its group, in rollout and, with gradients, in training. The same
layer serves prefill, decoding, scoring and training; they differ in what its
attention sees.

Shape legend, used throughout `train`:

  B  sequences (B = P * G)        D  width
  T  query time                   F  feed-forward width
  S  key/value time               N  heads
  P  prompts                      K  key/value heads
  G  completions per prompt       H  head width
  L  layers                       V  vocabulary

Rows are prompt-major: row b of B belongs to prompt b // G.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train import micro_batch
from train.sharding import ROWS, constrain, gathered, spread

_MASKED = -1e30  # finite: a query without any visible key must not give NaN

# Queries of a sequence whose scores are there at once.
_QUERIES = 256
# Parts of a longer sequence, each multiplied with the keys of the parts up to
# itself: 5/8 of all products, where causality needs half of them.
_PARTS = 4


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How RoPE's frequencies were stretched for a longer context.

  Without `low_freq_factor` all are divided by `factor` (position
  interpolation, arXiv 2306.15595). With it, those of Llama 3.1: wavelengths
  above `original_context / low_freq_factor` are, those below
  `original_context / high_freq_factor` are not, and what lies between goes over
  from the one to the other linearly in 1 / wavelength
  (https://github.com/meta-llama/llama-models, models/llama3/model.py).

  Raises:
    ValueError: a number that is not positive, or bands in the wrong order.
  """

  factor: float
  low_freq_factor: float | None = None
  high_freq_factor: float | None = None
  original_context: int | None = None  # tokens

  def __post_init__(self):
    """Rejects impossible numbers."""
    bands = self.low_freq_factor, self.high_freq_factor, self.original_context
    given = [x for x in bands if x is not None]
    if len(given) not in (0, 3):
      raise ValueError(f'{self}: the bands need all three numbers')
    if not all(0 < x < float('inf') for x in [self.factor, *given]):
      raise ValueError(f'{self}: expected positive numbers')
    if given and not self.low_freq_factor < self.high_freq_factor:
      raise ValueError(f'{self}: low_freq_factor must be the smaller one')

  def scale(self, frequency: np.ndarray) -> np.ndarray:
    """Stretches frequencies, float64 `[H / 2]`, radians per token."""
    slow = frequency / self.factor
    if self.low_freq_factor is None:
      return slow
    low, high = self.low_freq_factor, self.high_freq_factor
    turns = self.original_context * frequency / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * slow + share * frequency


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and options of a decoder.

  Raises:
    ValueError: a size that is not positive, an odd head width (RoPE rotates
      pairs), or heads that the key/value heads do not divide.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_width: int
  ff_width: int
  context: int  # tokens
  rope_theta: float
  tied_embeddings: bool
  rms_eps: float = 1e-5
  qkv_bias: bool = False
  qk_norm: bool = False
  rope_scaling: RopeScaling | None = None

  def __post_init__(self):
    """Rejects impossible sizes."""
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type in (int, float) and not value > 0:
        raise ValueError(f'{field.name} must be positive, got {value}')
    if self.heads % self.kv_heads:
      raise ValueError(
        f'heads must be a multiple of kv_heads, got {self.heads} and '
        f'{self.kv_heads}'
      )
    if self.head_width % 2:
      raise ValueError(f'head_width must be even, got {self.head_width}')


class KeyValues(NamedTuple):
  """Keys and values of a layer, or of all, laid out for their products."""

  k: jax.Array  # [..., B, K, H, S], after RoPE
  v: jax.Array  # [..., B, K, S, H]


class LayerWise(NamedTuple):
  """The weights as `Decoder.decode` wants them, not stacked."""

  embed: jax.Array  # [V, D]
  blocks: list[dict[str, jax.Array]]  # of each layer
  norm: jax.Array  # [D]
  head: jax.Array  # [V, D] if the embeddings are tied, else [D, V]


class Blocks(nnx.Module):
  """Parameters of all layers, stacked along a leading axis L."""

  def __init__(self, config: ModelConfig, param_dtype, rngs: nnx.Rngs):
    """Draws matrices from N(0, 0.02), smaller where they end a residual."""
    c = config
    residual = 0.02 / np.sqrt(2 * c.layers)

    def normal(*shape, stddev=0.02):
      init = nnx.initializers.normal(stddev)
      return nnx.Param(init(rngs.params(), (c.layers, *shape), param_dtype))

    def ones(*shape):
      return nnx.Param(jnp.ones((c.layers, *shape), param_dtype))

    def zeros(*shape):
      return nnx.Param(jnp.zeros((c.layers, *shape), param_dtype))

    self.attention_norm = ones(c.width)
    self.q = normal(c.width, c.heads, c.head_width)
    self.k = normal(c.width, c.kv_heads, c.head_width)
    self.v = normal(c.width, c.kv_heads, c.head_width)
    self.o = normal(c.heads, c.head_width, c.width, stddev=residual)
    if c.qkv_bias:
      self.q_bias = zeros(c.heads, c.head_width)
      self.k_bias = zeros(c.kv_heads, c.head_width)
      self.v_bias = zeros(c.kv_heads, c.head_width)
    if c.qk_norm:
      self.q_norm = ones(c.head_width)
      self.k_norm = ones(c.head_width)
    self.mlp_norm = ones(c.width)
    self.gate = normal(c.width, c.ff_width)
    self.up = normal(c.width, c.ff_width)
    self.down = normal(c.ff_width, c.width, stddev=residual)


class Decoder(nnx.Module):
  """Decoder with RMSNorm, RoPE, grouped-query attention and SwiGLU.

  Parameters: `embed [V, D]`, `blocks` (see `Blocks`), `norm [D]` and, unless
  the embeddings are tied, `head [D, V]`.
  """

  def __init__(
    self, config: ModelConfig, *, param_dtype=jnp.float32, rngs: nnx.Rngs
  ):
    """Initialises all parameters in `param_dtype` from `rngs.params`."""
    self.config = config
    normal = nnx.initializers.normal(0.02)
    embed_shape = (config.vocab_size, config.width)
    self.embed = nnx.Param(normal(rngs.params(), embed_shape, param_dtype))
    self.blocks = Blocks(config, param_dtype, rngs)
    self.norm = nnx.Param(jnp.ones(config.width, param_dtype))
    if not config.tied_embeddings:
      self.head = nnx.Param(
        normal(rngs.params(), embed_shape[::-1], param_dtype)
      )

  def __call__(
    self,
    prompts: jax.Array,
    lengths: jax.Array,
    completions: jax.Array,
    *,
    compute_dtype=jnp.float32,
    remat: bool = False,
  ) -> tuple[jax.Array, jax.Array]:
    """Runs all layers over prompts and, behind each, its completions.

    A prompt's tokens run once; its completions see its keys and values, and
    not each other. All tokens go through a layer in one pass, so a sharded
    weight is gathered once and its gradient summed over devices once.

    Args:
      prompts: int32 `[P, S]`, padded on the right.
      lengths: int32 `[P]`, real tokens of the prompts.
      completions: int32 `[B, T]`, padded on the right. T may be 0.
      compute_dtype: of matrix products and activations. RMSNorm, RoPE and
        softmax are float32 always.
      remat: recompute whole layers in the backward pass, matrix products too.

    Returns:
      Normed hidden states in `compute_dtype`, `[P, S, D]` and `[B, T, D]`.

    Raises:
      ValueError: a P that does not divide B.
    """
    (count, length), (batch, time) = prompts.shape, completions.shape
    group = _group(batch, count)

    # A prompt and its completions are one row, [P, S + G * T].
    def joined(prompts, completions):
      shape = count, group * time, *completions.shape[2:]
      return jnp.concatenate([prompts, completions.reshape(shape)], axis=1)

    def split(row):
      shape = batch, time, *row.shape[2:]
      return row[:, :length], row[:, length:].reshape(shape)

    start = jnp.repeat(lengths, group)[:, None]
    positions = joined(_positions(prompts), start + _positions(completions))

    def attend(q, k, v):
      prompt_q, completion_q = split(q)
      prefix, own = map(_laid_out, split(k), split(v))
      return joined(
        _attend_causal(prompt_q, prefix),
        _attend_causal(completion_q, own, prefix, lengths),
      ), None

    tokens = joined(prompts, completions)
    hidden, _ = self._scan(tokens, positions, attend, compute_dtype, remat)
    return split(hidden)

  def prefill(
    self, prompts: jax.Array, *, compute_dtype=jnp.float32
  ) -> tuple[jax.Array, KeyValues]:
    """Runs all layers over sequences that nothing follows, or before `decode`.

    Args:
      prompts: int32 `[P, S]`, padded on the right.
      compute_dtype: see `__call__`.

    Returns:
      Normed hidden states `[P, S, D]` in `compute_dtype`, and the keys and
      values, stacked along a leading axis L. Those of padding mean nothing.
    """

    def attend(q, k, v):
      own = _laid_out(k, v)
      return _attend_causal(q, own), own

    positions = _positions(prompts)
    return self._scan(prompts, positions, attend, compute_dtype, remat=False)

  def _scan(self, tokens, positions, attend, compute_dtype, remat):
    """All layers and the last norm, and what `attend` kept of each layer."""
    rotation = _rotation(positions, self.config)

    def layer(x, weights):
      weights = {
        name: gathered(leaf.astype(compute_dtype), f'blocks/{name}')
        for name, leaf in weights.items()
      }
      return self._layer(x, weights, rotation, attend)

    # Elementwise work is always redone in the backward pass: it is cheap, and
    # what it would keep is more than the products' results.
    keep = None if remat else jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(layer, policy=keep, prevent_cse=False)
    weights = nnx.to_pure_dict(nnx.state(self.blocks, nnx.Param))
    x = gathered(self.embed[...], 'embed')[tokens].astype(compute_dtype)
    x, kept = jax.lax.scan(layer, constrain(x, ROWS), weights)
    norm = self.norm[...].astype(compute_dtype)
    return _rms_norm(x, norm, self.config.rms_eps), kept

  def layer_wise(self, compute_dtype) -> LayerWise:
    """The weights for `decode`: cast, gathered and cut once for many tokens."""

    def ready(weight, path):
      return gathered(weight.astype(compute_dtype), path)

    stacked = nnx.to_pure_dict(nnx.state(self.blocks, nnx.Param))
    blocks = [
      {name: ready(leaf[i], f'blocks/{name}') for name, leaf in stacked.items()}
      for i in range(self.config.layers)
    ]
    embed = ready(self.embed[...], 'embed')
    tied = self.config.tied_embeddings
    head = embed if tied else ready(self.head[...], 'head')
    return LayerWise(embed, blocks, self.norm[...].astype(compute_dtype), head)

  def decode(
    self,
    weights: LayerWise,
    tokens: jax.Array,
    positions: jax.Array,
    cache: list[KeyValues],
    index: jax.Array | int,
    *,
    prefix: list[KeyValues],
    lengths: jax.Array,
  ) -> tuple[jax.Array, list[KeyValues]]:
    """Runs all layers over the next tokens of completions that are cached.

    Queries see their prompt and the cache's slots up to their own, which are
    all real because completions are dense from slot 0. Layers are not scanned:
    on a CPU a scan would copy its slices of weights and cache for every token.

    Args:
      weights: from `layer_wise`, in the dtype to compute in.
      tokens: int32 `[B, T]`, all real.
      positions: int32 `[B, T]`, number of real tokens before each token.
      cache: of each layer, see `init_cache`.
      index: int32 scalar, slot of the first token; the caller keeps
        `index + T <= S`.
      prefix: of each layer, see `prefill` and `unstack`.
      lengths: int32 `[P]`, real tokens of the prompts.

    Returns:
      Normed hidden states `[B, T, D]`, and the cache with these tokens.

    Raises:
      ValueError: a P that does not divide B.
    """
    slots = index + jnp.arange(tokens.shape[1])[None]
    mask = _causal_mask(slots, cache[0].v.shape[2])
    group = _group(len(tokens), len(lengths))
    mask = _with_prefix(mask, lengths, prefix[0].v.shape[2], group)
    rotation = _rotation(positions, self.config)
    x = constrain(weights.embed[tokens], ROWS)  # [B, T, D]
    new = []
    for block, old, shared in zip(weights.blocks, cache, prefix, strict=True):

      def attend(q, k, v, old=old, shared=shared):
        own = _laid_out(k, v)
        own = KeyValues(
          jax.lax.dynamic_update_slice(old.k, own.k, (0, 0, 0, index)),
          jax.lax.dynamic_update_slice(old.v, own.v, (0, 0, index, 0)),
        )
        return _attend(q, [shared, own], mask), own

      x, own = self._layer(x, block, rotation, attend)
      new.append(own)
    return _rms_norm(x, weights.norm, self.config.rms_eps), new

  def _layer(self, x, weights, rotation, attend):
    """One layer: the new residual stream, and what `attend` keeps."""
    eps = self.config.rms_eps
    w = _matrices(weights)
    y = _rms_norm(x, w['attention_norm'], eps)
    q, k, v = _project(y, w, self.config.head_width, rotation, eps)
    y, kept = attend(q, k, v)
    x += _linear(y.reshape(*y.shape[:2], -1), w['o'])
    x = constrain(x, ROWS)
    y = _rms_norm(x, w['mlp_norm'], eps)
    y = jax.nn.silu(_linear(y, w['gate'])) * _linear(y, w['up'])
    y = constrain(y, ROWS, None, 'tensor')
    return constrain(x + _linear(y, w['down']), ROWS), kept

  @property
  def _head(self) -> str:
    return 'embed' if self.config.tied_embeddings else 'head'

  def head_weights(self, compute_dtype) -> jax.Array:
    """What `logits` multiplies by, for a loop: see `sharding.spread`."""
    weights = getattr(self, self._head)[...].astype(compute_dtype)
    return spread(gathered(weights, self._head), self._head)

  def logits(
    self,
    hidden: jax.Array,
    *,
    compute_dtype,
    weights: jax.Array | None = None,
  ) -> jax.Array:
    """Logits of hidden states.

    Args:
      hidden: `[B, ..., D]`.
      compute_dtype: of the product.
      weights: from `head_weights`.

    Returns:
      float32 `[B, ..., V]`.
    """

    def product(hidden, weights):
      tied = self.config.tied_embeddings
      return jnp.einsum(
        '...d,vd->...v' if tied else '...d,dv->...v',
        hidden,
        weights,
        precision=_precision(compute_dtype),
        preferred_element_type=jnp.float32,
      )

    hidden = hidden.astype(compute_dtype)
    if weights is None:
      weights = getattr(self, self._head)[...].astype(compute_dtype)
      return product(hidden, gathered(weights, self._head))
    if weights.shape[0] == 1:
      return product(hidden, weights[0])
    rows = hidden.reshape(weights.shape[0], -1, *hidden.shape[1:])
    rows = jax.vmap(product)(constrain(rows, ROWS), weights)
    return rows.reshape(*hidden.shape[:-1], -1)


def init_cache(
  config: ModelConfig, batch: int, length: int, dtype
) -> list[KeyValues]:
  """An empty decoding cache of `length` slots, layer by layer."""

  def empty(*shape):
    return constrain(
      jnp.zeros((batch, config.kv_heads, *shape), dtype), ROWS, 'tensor'
    )

  return [
    KeyValues(
      empty(config.head_width, length), empty(length, config.head_width)
    )
    for _ in range(config.layers)
  ]


def unstack(stacked: KeyValues) -> list[KeyValues]:
  """Keys and values of all layers, layer by layer."""
  return [KeyValues(k, v) for k, v in zip(*stacked, strict=True)]


def _precision(compute_dtype) -> jax.lax.Precision:
  # By default TPUs multiply float32 in one bfloat16 pass and GPUs in TF32.
  exact = jnp.dtype(compute_dtype) == jnp.float32
  return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def _group(batch, prompts):
  if batch % prompts:
    raise ValueError(f'batch {batch} is not a multiple of {prompts} prompts')
  return batch // prompts


def _positions(tokens):
  return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)


def _causal_mask(slots, length):
  """Keys up to each query's own slot, of `[1, T]`: bool `[1, T, S]`."""
  return jnp.arange(length)[None, None] <= slots[..., None]


def _with_prefix(mask, lengths, length, group):
  """Puts the tokens of the prompts, real ones seen, first: bool `[B, T, S]`."""
  seen = jnp.arange(length)[None] < lengths[:, None]  # [P, S]
  seen = jnp.repeat(seen, group, axis=0)[:, None]
  batch, time = len(seen), mask.shape[1]
  parts = [
    jnp.broadcast_to(part, (batch, time, part.shape[2]))
    for part in (seen, mask)
  ]
  return jnp.concatenate(parts, axis=2)


def _laid_out(k, v):
  """Keys and values `[B, S, K, H]` as `KeyValues`."""
  return KeyValues(jnp.einsum('bskh->bkhs', k), jnp.einsum('bskh->bksh', v))


def _matrices(weights):
  """Weights of a layer with the heads merged into one axis."""
  width = weights['q'].shape[0]
  merged = {name: weights[name].reshape(width, -1) for name in 'qkv'}
  return weights | merged | {'o': weights['o'].reshape(-1, width)}


def _linear(x, weight):
  """Multiplies `[B, T, in]` by `[in, out]`, as two matrices.

  For the gradient of a weight, XLA on a CPU would copy the activations
  transposed, slowly, if it had to contract over two axes, B and T.
  """
  batch, time, width = x.shape
  rows = x.reshape(batch * time, width)
  y = jnp.dot(rows, weight, precision=_precision(x.dtype))
  return y.reshape(batch, time, weight.shape[1])


def _rms_norm(x, weight, eps):
  wide = x.astype(jnp.float32)
  wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
  return (wide * jnp.broadcast_to(weight, x.shape)).astype(x.dtype)


def _rotation(positions, config):
  """Cosines and sines of RoPE, each float32 `[B, T, 1, H / 2]`."""
  exponent = np.arange(0, config.head_width, 2) / config.head_width
  frequency = config.rope_theta**-exponent
  if config.rope_scaling is not None:
    frequency = config.rope_scaling.scale(frequency)
  frequency = jnp.asarray(frequency, jnp.float32)
  # bfloat16 would be exact up to position 256 only.
  time = positions.astype(jnp.float32)[:, :, None, None]
  angles = time * frequency[None, None, None]
  return jnp.cos(angles), jnp.sin(angles)


def _rotate(x, rotation):
  """RoPE on the halves of the last axis, the Hugging Face convention."""
  cos, sin = rotation
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _project(x, w, head_width, rotation, eps):
  """Queries `[B, T, N, H]`, keys and values `[B, T, K, H]` of one layer."""
  q, k, v = (
    constrain(
      _linear(x, w[name]).reshape(*x.shape[:2], -1, head_width),
      ROWS,
      None,
      'tensor',
    )
    for name in 'qkv'
  )
  if 'q_bias' in w:
    q += w['q_bias'][None, None]
    k += w['k_bias'][None, None]
    v += w['v_bias'][None, None]
  if 'q_norm' in w:
    q, k = _rms_norm(q, w['q_norm'], eps), _rms_norm(k, w['k_norm'], eps)
  return _rotate(q, rotation), _rotate(k, rotation), v


def _attend_causal(q, own, prefix=None, lengths=None):
  """Attention of whole sequences, a block of queries at a time.

  Scores exist for one block only, and are computed again in the backward pass:
  T * S of them never are there at once (arXiv 2112.05682).

  Args:
    q: `[B, T, N, H]`.
    own: keys and values of the same tokens.
    prefix: those of the prompts, P rows.
    lengths: int32 `[P]`, real tokens of the prompts.

  Returns:
    `[B, T, N, H]` in the dtype of `q`.
  """
  batch, time = q.shape[:2]
  slots = jnp.arange(time)[None]

  def attend(q, slots, end):
    segments = [KeyValues(own.k[..., :end], own.v[:, :, :end])]
    mask = _causal_mask(slots, end)
    if prefix is not None:
      segments.insert(0, prefix)
      group = _group(batch, len(lengths))
      mask = _with_prefix(mask, lengths, prefix.v.shape[2], group)
    return _attend(q, segments, mask)

  def part(start, end):
    block = jax.checkpoint(
      functools.partial(attend, end=end), prevent_cse=False
    )
    blocks = micro_batch.over_time(block, -(-(end - start) // _QUERIES))
    return blocks(q[:, start:end], slots[:, start:end])

  parts = min(_PARTS, -(-time // _QUERIES))
  if parts <= 1:
    return attend(q, slots, time)
  borders = [time * i // parts for i in range(parts + 1)]
  return jnp.concatenate(list(map(part, borders, borders[1:])), axis=1)


def _attend(q, segments, mask):
  """One softmax over all segments of keys; a prefix is never tiled.

  Args:
    q: `[B, T, N, H]`.
    segments: of keys and values of one layer, of P rows; where P < B, a row of
      the segment serves B / P neighbouring rows of `q`.
    mask: bool `[B, T, S]` or `[1, T, S]` over the concatenated S, True where
      visible.

  Returns:
    `[B, T, N, H]` in the dtype of `q`.
  """
  batch, time, heads, head_width = q.shape
  kv_heads = segments[0].k.shape[1]
  grouped = (kv_heads, heads // kv_heads, time)

  def product(x, y):
    # [P, G, K, R, T, X] times [P, K, X, Y]. Of these einsum would swap the
    # operands, which XLA on a CPU multiplies several times slower.
    prompts = y.shape[0]
    z = jax.lax.dot_general(
      x.reshape(prompts, batch // prompts, *grouped, x.shape[-1]),
      y,
      (((5,), (2,)), ((0, 2), (0, 1))),
      precision=_precision(q.dtype),
      preferred_element_type=jnp.float32,
    )  # [P, K, G, R, T, Y]
    return jnp.swapaxes(z, 1, 2).reshape(batch, *grouped, y.shape[-1])

  q = q.reshape(batch, time, *grouped[:2], head_width)
  q = jnp.einsum('btkrh->bkrth', q)
  scores = [product(q, k) for k, _ in segments]
  scores = jnp.concatenate(scores, axis=-1) * head_width**-0.5
  scores = jnp.where(mask[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  starts = np.cumsum([v.shape[2] for _, v in segments])[:-1]
  parts = zip(jnp.split(weights, starts, axis=-1), segments, strict=True)
  out = sum(product(weight, v) for weight, (_, v) in parts)
  out = jnp.einsum('bkrth->btkrh', out).reshape(batch, time, heads, head_width)
  return out.astype(q.dtype)
