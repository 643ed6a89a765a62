"""Which weights can an Adam step move visibly? Told before any training."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from sr_optax import paths

# For each format: bit pattern of the largest finite value.
_LARGEST = {'bfloat16': 0x7F7F, 'float16': 0x7BFF}
_CHUNK = 2**22  # weights widened at a time, 16 MiB as FP32


class FormatForecast(NamedTuple):
  """What round-to-nearest shows of Adam steps in one format."""

  movable: float
  """Share of the weights that the largest Adam step can move visibly."""
  steady: float
  """Share that every single step of a steady gradient moves."""
  steps_to_half: float
  """Steady steps in one direction until half of the weights have moved."""


class LeafForecast(NamedTuple):
  """Forecast of one leaf, or of all."""

  count: int
  """Number of weights."""
  bfloat16: FormatForecast
  float16: FormatForecast


class Forecast(NamedTuple):
  """Forecast of a model."""

  largest_step: float
  """The largest single step assumed, in units of the weights."""
  steady_step: float
  """The step of a steady gradient."""
  total: LeafForecast
  """All weights together."""
  leaves: dict[str, LeafForecast]
  """By leaf path."""


def forecast_sticking(
  params,
  learning_rate: float,
  *,
  betas: tuple[float, float] = (0.9, 0.999),
  eps: float = 1e-8,
  gradient_rms: float = 1.0,
) -> Forecast:
  """Forecasts, before any training, how many weights will stick under RN.

  The weights are first put on the BF16 and the FP16 grid, as a checkpoint
  released in that format would be, and become the start of an FP32 shadow. A
  step d is *visible* if the nearest grid value to the new shadow is another
  one: if d exceeds half the distance to the neighbour (or equals it where the
  tie goes to the neighbour). Nothing is modelled: all 65,536 values of each
  format are stepped and rounded, binade edges (where the neighbour towards 0
  is at half the distance), subnormals, zeros, saturation and the rounding of
  the FP32 shadow itself included, then weighted with the histogram of the
  weights. Of the two directions the one that moves a weight first counts.

  Two sizes of a step, both from Adam's lr * m / (sqrt(v) + eps):

  - *steady*: a gradient that keeps its sign and size, m^2 = v, so
    `learning_rate`;
  - *largest*: |m| <= sqrt((1 - b1) / (1 - b2)) sqrt(v) for b1 <= b2, the bound
    of PULSE (https://arxiv.org/abs/2602.03839): 10 lr for (0.9, 0.999), 1.41
    lr for (0.9, 0.95). It is not attained (the supremum, where gradients grow
    by b2 / b1 each step, is 7.27 and 1.17 lr), so what cannot move by it
    cannot move.

  `eps` shrinks both by sqrt(v) / (sqrt(v) + eps), with `gradient_rms` in place
  of sqrt(v). Weight decay is left out.

  Args:
    params: tree of weights. bfloat16, float16, float32 and float64 leaves
      count, others are left out. Concrete arrays: this is no function for jit.
    learning_rate: of Adam, positive.
    betas: decay rates (b1, b2) of Adam, 0 <= b1 <= b2 < 1.
    eps: Adam's epsilon.
    gradient_rms: typical size of a gradient's entries, the sqrt(v) beside
      `eps`. The default makes `eps` negligible.

  Returns:
    A `Forecast`. Shares of nothing (leaves of size 0) are 0 and their steps
    NaN; `steps_to_half` is inf where half of the weights never move (steps
    lost in the FP32 shadow, NaN, Inf).

  Raises:
    TypeError: if no leaf is a float array.
    ValueError: if an option is out of range.

  Example:
    >>> import jax.numpy as jnp, sr_optax
    >>> params = {'w': jnp.full((5, 7), 0.02, jnp.bfloat16)}
    >>> forecast = sr_optax.forecast_sticking(params, 1e-6)
    >>> forecast.total.bfloat16
    FormatForecast(movable=0.0, steady=0.0, steps_to_half=62.0)
    >>> forecast.leaves['w'].float16.steps_to_half
    8.0
  """
  named, _ = paths.flatten(params)
  return forecast_leaves(
    named,
    learning_rate,
    betas=betas,
    eps=eps,
    gradient_rms=gradient_rms,
  )


def forecast_leaves(
  named: Iterable[tuple[str, np.ndarray]],
  learning_rate: float,
  *,
  betas: tuple[float, float] = (0.9, 0.999),
  eps: float = 1e-8,
  gradient_rms: float = 1.0,
) -> Forecast:
  """As `forecast_sticking`, of (path, array) pairs that come one at a time."""
  steady = steady_step(learning_rate, eps, gradient_rms)
  largest = steady * largest_ratio(*betas)
  tables = {name: _table(name, largest, steady) for name in _LARGEST}
  sums = {name: np.zeros(2**16, np.int64) for name in _LARGEST}
  leaves = {}
  for path, x in named:
    if not jnp.issubdtype(x.dtype, jnp.floating):
      continue
    counts = _histograms(x)
    leaves[path] = _leaf(counts, tables)
    sums = {name: sums[name] + counts[name] for name in _LARGEST}
  if not leaves:
    raise TypeError('expected at least one float leaf, got none')
  return Forecast(largest, steady, _leaf(sums, tables), leaves)


def steady_step(
  learning_rate: float, eps: float = 1e-8, gradient_rms: float = 1.0
) -> float:
  """Size of an Adam step whose gradient keeps its sign and size."""
  for name, value in (
    ('learning_rate', learning_rate),
    ('gradient_rms', gradient_rms),
  ):
    if not 0 < value < math.inf:
      raise ValueError(f'{name}: expected a positive number, got {value}')
  if not 0 <= eps < math.inf:
    raise ValueError(f'eps: expected a number >= 0, got {eps}')
  return float(learning_rate) * gradient_rms / (gradient_rms + eps)


def largest_ratio(b1: float, b2: float) -> float:
  """PULSE's bound on |m| / sqrt(v) of Adam, bias corrections included."""
  if not 0 <= b1 <= b2 < 1:
    raise ValueError(
      f'betas: expected 0 <= b1 <= b2 < 1 (the bound needs it), got {b1}, {b2}'
    )
  return math.sqrt((1 - b1) / (1 - b2))


def _table(name: str, largest: float, steady: float) -> dict[str, np.ndarray]:
  """For every bit pattern of a format: what a step does to it."""
  patterns = np.arange(2**16, dtype=np.uint16)
  q = patterns.view(jnp.dtype(name)).astype(np.float32)
  odd = (patterns & 1).astype(bool)
  with np.errstate(all='ignore'):
    steps = np.minimum(
      *(_steps(q, odd, sign * np.float32(steady), name) for sign in (1, -1))
    )
    one = np.minimum(
      *(_steps(q, odd, sign * np.float32(largest), name) for sign in (1, -1))
    )
  return {'movable': one == 1, 'steady': steps == 1, 'steps': steps}


def _steps(q, odd, step, name: str) -> np.ndarray:
  """Steps of size `step` until RN of the FP32 shadow leaves the grid value.

  Below the midpoint the shadow stays in one binade of FP32, so that all its
  steps are as large as the first.
  """
  grid = np.arange(2**16, dtype=np.uint16)
  # The neighbour in the direction of the step, by its bit pattern.
  away = (step > 0) == (grid < 0x8000)
  neighbour = np.where(away, grid + np.uint16(1), grid - np.uint16(1))
  zero = (grid & 0x7FFF) == 0
  neighbour = np.where(zero, np.uint16(1 if step > 0 else 0x8001), neighbour)
  target = neighbour.view(jnp.dtype(name)).astype(np.float64)
  half = np.abs(target - q.astype(np.float64)) / 2
  moved = np.abs((q + step).astype(np.float64) - q)
  # A tie goes to the even value: an odd weight leaves at the midpoint.
  count = np.where(odd, np.ceil(half / moved), np.floor(half / moved) + 1)
  # The largest finite value saturates, Inf and NaN stay; q + step may be Inf.
  lost = (moved == 0) | ~np.isfinite(target) | ~np.isfinite(q)
  return np.where(lost, np.inf, np.maximum(count, 1))


def _histograms(x) -> dict[str, np.ndarray]:
  """How often each bit pattern occurs on either grid; int64[2^16]."""
  counts = {name: np.zeros(2**16, np.int64) for name in _LARGEST}
  flat = np.asarray(x).reshape(-1)
  for i in range(0, flat.size, _CHUNK):
    chunk = flat[i : i + _CHUNK].astype(np.float32)
    for name, largest in _LARGEST.items():
      bits = _on_grid(chunk, name, largest)
      counts[name] += np.bincount(bits, minlength=2**16)
  return counts


def _on_grid(x: np.ndarray, name: str, largest: int) -> np.ndarray:
  """Bit patterns of FP32 weights rounded to nearest even, saturated."""
  limit = np.uint16(largest).view(jnp.dtype(name)).astype(np.float32)
  clipped = np.where(np.isfinite(x), np.clip(x, -limit, limit), x)
  return clipped.astype(jnp.dtype(name)).view(np.uint16)


def _leaf(counts: dict[str, np.ndarray], tables: dict) -> LeafForecast:
  size = int(counts['bfloat16'].sum())
  formats = {}
  for name, table in tables.items():
    n = counts[name]
    order = np.argsort(table['steps'], kind='stable')
    reached = np.cumsum(n[order])
    half = math.nan
    if size:
      half = table['steps'][order][np.searchsorted(2 * reached, size)]
    formats[name] = FormatForecast(
      float(n[table['movable']].sum() / max(size, 1)),
      float(n[table['steady']].sum() / max(size, 1)),
      float(half),
    )
  return LeafForecast(size, **formats)


def format_table(forecast: Forecast, top: int | None = None) -> Iterator[str]:
  """Lines of an aligned table, leaves that stick most (in BF16) first."""
  leaves = sorted(
    forecast.leaves.items(),
    key=lambda item: (item[1].bfloat16.movable, -item[1].count),
  )
  rows = leaves if top is None else leaves[:top]
  if top is not None and top < len(leaves):
    rest = len(leaves) - top
    more = [f'({rest} more {"leaf" if rest == 1 else "leaves"})']
  else:
    more = []
  cells = [['leaf', 'weights'] + ['movable', 'steady', 'steps to half'] * 2]
  for path, leaf in [*rows, ('all', forecast.total)]:
    cells.append(
      [path, f'{leaf.count:,}']
      + [
        text
        for part in (leaf.bfloat16, leaf.float16)
        for text in (
          f'{part.movable:.2%}',
          f'{part.steady:.2%}',
          f'{part.steps_to_half:,.0f}',
        )
      ]
    )
  widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
  group = sum(widths[2:5]) + 4
  lead = ' ' * (widths[0] + widths[1] + 4)
  yield f'{lead}{"BF16":^{group}}  {"FP16":^{group}}'.rstrip()
  for i, row in enumerate(cells):
    if i == len(cells) - 1:
      yield from more
    first = row[0].ljust(widths[0])
    rest = [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
    yield '  '.join([first, *rest])
