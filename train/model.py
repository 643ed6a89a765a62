"""One decoder for the Llama, Qwen2 and Qwen3 families.

The keys and values of a prompt are computed once and shared by the
completions of its group, in rollout and, with gradients, in training. One
forward serves prefill, decoding, scoring and training.

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.sharding import ROWS, constrain, gathered, spread

_MASKED = -1e30  # finite: a query without any visible key must not give NaN


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
  """Keys and values of all layers, of a prompt or of a decoding cache."""

  k: jax.Array  # [L, B, S, K, H], after RoPE
  v: jax.Array  # [L, B, S, K, H]


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
    tokens: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    *,
    prefix: KeyValues | None = None,
    prefix_valid: jax.Array | None = None,
    cache: KeyValues | None = None,
    cache_index: jax.Array | int | None = None,
    compute_dtype=jnp.float32,
    remat: bool = False,
  ) -> tuple[jax.Array, KeyValues]:
    """Runs all layers.

    Without a cache, queries see the valid tokens up to themselves; with one,
    the cache slots up to their own, which are all real because completions
    are dense from slot 0 (`valid` is not used then). With a prefix they see
    the valid tokens of their prompt as well.

    Args:
      tokens: int32 `[B, T]`, padded on the right.
      positions: int32 `[B, T]`, number of real tokens before each token.
      valid: bool `[B, T]`, False where padded.
      prefix: `[L, P, S, K, H]`, what this method returned for the prompts.
      prefix_valid: bool `[P, S]`, the `valid` of the prompts.
      cache: `[L, B, S, K, H]`, see `init_cache`.
      cache_index: int32 scalar, slot of the first token; the caller keeps
        `cache_index + T <= S`.
      compute_dtype: of matrix products and activations. RMSNorm, RoPE and
        softmax are float32 always.
      remat: recompute whole layers in the backward pass, matrix products too.

    Returns:
      Normed hidden states `[B, T, D]` in `compute_dtype`, and the updated
      cache or, without one, the keys and values of these T tokens.

    Raises:
      ValueError: a prefix without `prefix_valid` or a cache without
        `cache_index`, or the reverse; a P that does not divide B.
    """
    batch = tokens.shape[0]
    if (prefix is None) != (prefix_valid is None):
      raise ValueError('prefix and prefix_valid go together')
    if prefix is not None and batch % prefix_valid.shape[0]:
      raise ValueError(
        f'batch {batch} is not a multiple of {prefix_valid.shape[0]} prompts'
      )
    if (cache is None) != (cache_index is None):
      raise ValueError('cache and cache_index go together')

    slots = None if cache is None else cache.k.shape[2]
    mask = _visible(valid, prefix_valid, slots, cache_index)
    rotation = _rotation(positions, self.config)
    eps, precision = self.config.rms_eps, _precision(compute_dtype)

    def layer(carry, xs):
      x, cache = carry
      index, weights, prefix = xs
      w = _matrices(
        {
          name: gathered(leaf.astype(compute_dtype), f'blocks/{name}')
          for name, leaf in weights.items()
        }
      )
      y = _rms_norm(x, w['attention_norm'], eps)
      q, k, v = _project(y, w, self.config.head_width, rotation, eps, precision)
      own = KeyValues(k, v)
      if cache is not None:
        # In the carry, in place: 1.5 times faster on CPUs than through xs and
        # ys; unrolling the scan does not help decoding.
        cache = jax.tree.map(
          lambda full, new: jax.lax.dynamic_update_slice(
            full, new[None].astype(full.dtype), (index, 0, cache_index, 0, 0)
          ),
          cache,
          own,
        )
        own = jax.tree.map(lambda full: full[index], cache)
      segments = [own] if prefix is None else [prefix, own]
      segments = jax.tree.map(lambda leaf: leaf.astype(compute_dtype), segments)
      y = _attend(q, segments, mask, precision)
      x += _linear(y.reshape(*y.shape[:2], -1), w['o'], precision)
      x = constrain(x, ROWS)
      y = _rms_norm(x, w['mlp_norm'], eps)
      gate = _linear(y, w['gate'], precision)
      y = jax.nn.silu(gate) * _linear(y, w['up'], precision)
      y = constrain(y, ROWS, None, 'tensor')
      x = constrain(x + _linear(y, w['down'], precision), ROWS)
      return (x, cache), own if cache is None else None

    # Elementwise work is always redone in the backward pass: it is cheap, and
    # what it would keep is more than the products' results.
    keep = None if remat else jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(layer, policy=keep, prevent_cse=False)
    weights = nnx.to_pure_dict(nnx.state(self.blocks, nnx.Param))
    x = gathered(self.embed[...], 'embed')[tokens].astype(compute_dtype)
    x = constrain(x, ROWS)  # [B, T, D]
    xs = (jnp.arange(self.config.layers), weights, prefix)
    (x, cache), own = jax.lax.scan(layer, (x, cache), xs)
    x = _rms_norm(x, self.norm[...].astype(compute_dtype), eps)
    return x, own if cache is None else cache

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
) -> KeyValues:
  """An empty decoding cache of `length` slots, `[L, B, S, K, H]`."""
  shape = (config.layers, batch, length, config.kv_heads, config.head_width)
  empty = constrain(jnp.zeros(shape, dtype), None, ROWS, None, 'tensor')
  return KeyValues(empty, empty)


def _precision(compute_dtype) -> jax.lax.Precision:
  # By default TPUs multiply float32 in one bfloat16 pass and GPUs in TF32.
  exact = jnp.dtype(compute_dtype) == jnp.float32
  return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def _visible(valid, prefix_valid, slots, cache_index):
  """Which keys a query sees, the prefix first: bool `[B, T, S]`."""
  batch, time = valid.shape
  query = jnp.arange(time)[:, None]
  if slots is None:
    mask = valid[:, None] & (query >= query.T)[None]
  else:
    seen = jnp.arange(slots)[None] <= query + cache_index
    mask = jnp.broadcast_to(seen, (batch, time, slots))
  if prefix_valid is None:
    return mask
  prompts, length = prefix_valid.shape
  prefix = jnp.repeat(prefix_valid, batch // prompts, axis=0)[:, None]
  prefix = jnp.broadcast_to(prefix, (batch, time, length))
  return jnp.concatenate([prefix, mask], axis=2)


def _matrices(weights):
  """Weights of a layer with the heads merged into one axis."""
  width = weights['q'].shape[0]
  merged = {name: weights[name].reshape(width, -1) for name in 'qkv'}
  return weights | merged | {'o': weights['o'].reshape(-1, width)}


def _linear(x, weight, precision):
  """Multiplies `[B, T, in]` by `[in, out]`, as two matrices.

  For the gradient of a weight, XLA on a CPU would copy the activations
  transposed, slowly, if it had to contract over two axes, B and T.
  """
  batch, time, width = x.shape
  y = jnp.dot(x.reshape(batch * time, width), weight, precision=precision)
  return y.reshape(batch, time, -1)


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


def _project(x, w, head_width, rotation, eps, precision):
  """Queries `[B, T, N, H]`, keys and values `[B, T, K, H]` of one layer."""
  q, k, v = (
    constrain(
      _linear(x, w[name], precision).reshape(*x.shape[:2], -1, head_width),
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


def _attend(q, segments, mask, precision):
  """One softmax over all segments of keys; a prefix is never tiled.

  Args:
    q: `[B, T, N, H]`.
    segments: of keys and values `[P, S, K, H]`; where P < B, a row of the
      segment serves B / P neighbouring rows of `q`.
    mask: bool `[B, T, S]` over the concatenated S, True where visible.
    precision: of the matrix products.

  Returns:
    `[B, T, N, H]` in the dtype of `q`.
  """
  batch, time, heads, head_width = q.shape
  kv_heads = segments[0].k.shape[2]
  grouped = (time, kv_heads, heads // kv_heads)
  scores = []
  for k, _ in segments:
    prompts, length = k.shape[:2]
    score = jnp.einsum(
      'pgtkrh,pskh->pgkrts',
      q.reshape(prompts, batch // prompts, *grouped, head_width),
      k,
      precision=precision,
      preferred_element_type=jnp.float32,
    )
    scores.append(score.reshape(batch, *grouped[1:], time, length))
  scores = jnp.concatenate(scores, axis=-1) * head_width**-0.5
  scores = jnp.where(mask[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  out, start = 0, 0
  for _, v in segments:
    prompts, length = v.shape[:2]
    weight = weights[..., start : start + length]
    start += length
    part = jnp.einsum(
      'pgkrts,pskh->pgtkrh',
      weight.reshape(prompts, batch // prompts, *grouped[1:], time, length),
      v,
      precision=precision,
      preferred_element_type=jnp.float32,
    )
    out += part.reshape(q.shape)
  return out.astype(q.dtype)
