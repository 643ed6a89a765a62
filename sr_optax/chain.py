"""`chain`: an optax chain whose links before the last see FP32 only."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from sr_optax import link as link_lib
from sr_optax import paths


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
  """An inner FP32 optax chain and the rounding link that ends it."""

  inner: optax.GradientTransformationExtraArgs
  link: link_lib.Link

  def init(self, params) -> tuple:
    """State of every transform in order, the link's last."""
    link_state = self.link.init(params)  # checks the parameters first
    shadow = jax.tree.map(self._shadow, params)
    return (*self.inner.init(shadow), link_state)

  def update(self, updates, state: tuple, params=None, **extra):
    """Runs the inner chain on FP32 gradients and shadow, then the link."""
    *inner_state, link_state = state
    shadow = self.link.current(link_state, params)
    link_lib.match_updates(paths.flatten(updates)[0], shadow)
    fp32_params = paths.replace(params, dict(shadow))
    updates, inner_state = self.inner.update(
      jax.tree.map(_widen, updates), tuple(inner_state), fp32_params, **extra
    )
    updates, link_state = self.link.step(
      updates, link_state, params, shadow, **extra
    )
    return updates, (*inner_state, link_state)

  def _shadow(self, x):
    return link_lib.to_float32(x) if self.link.rounds(x) else x


def chain(
  *transforms: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """As `optax.chain`, for chains that end in a rounding link.

  Initialises and feeds all transforms but the last with the FP32 shadow
  weights and with gradients in FP32, so moments, schedules, clipping and weight
  decay act in FP32 on the shadow. (In a plain `optax.chain`, which works too,
  `optax.adamw` initialised on BF16 parameters keeps its second moment in BF16,
  where with b2 = 0.999 it cannot decay:
  https://github.com/google-deepmind/optax/issues/1552)

  Args:
    *transforms: optax transforms; the last one is `stochastic_rounding(...)`
      or `nearest_rounding(...)`.

  Returns:
    A transform; its state is the tuple of the transforms' states.

  Raises:
    TypeError: if the last transform is not a rounding link.

  Example:
    >>> import jax, optax, sr_optax
    >>> tx = sr_optax.chain(
    ...   optax.clip_by_global_norm(1.0),
    ...   optax.adamw(1e-6),
    ...   sr_optax.stochastic_rounding(jax.random.key(0)),
    ... )
  """
  last = transforms[-1] if transforms else None
  link = getattr(getattr(last, 'update', None), '__self__', None)
  if not isinstance(link, link_lib.Link):
    raise TypeError(
      'chain: the last transform must be stochastic_rounding(...) or '
      f'nearest_rounding(...), got {type(last).__name__}'
    )
  for part in transforms:
    if not (hasattr(part, 'init') and hasattr(part, 'update')):
      raise TypeError(
        f'chain: expected optax transforms, got {type(part).__name__}'
      )
  if len(transforms) == 1:  # `optax.chain` needs one; this has an empty state
    inner = optax.with_extra_args_support(optax.identity())
  else:
    inner = optax.chain(*transforms[:-1])
  return link_lib.transform(Chain(inner, link))


def upcast() -> optax.GradientTransformation:
  """Turns gradients of fewer than 32 bits into FP32: a first link.

  For hosts that wrap a chain from outside and need one dtype on both of their
  branches (`optax.apply_if_finite`, `optax.MultiSteps`).
  """
  return optax.stateless(lambda updates, _: jax.tree.map(_widen, updates))


def _widen(g):
  if jnp.issubdtype(g.dtype, jnp.floating) and jnp.finfo(g.dtype).bits < 32:
    return link_lib.to_float32(g)
  return g
