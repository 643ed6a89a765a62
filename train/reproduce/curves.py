"""Curves of runs and what is read off them: crossings, pairs, intervals."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SERIES = (
  'step',  # of the evaluations, 0 first
  'reward',  # expected, on held-out questions
  'kl',  # from the reference, on held-out prompts, nats per completion
  'kl_step',  # from the policy one step before, the same
  'changed',  # share of visible weights a step, mean since the last evaluation
  'least_changed',  # mean(|dshadow| / grid step), the same
  'slope',  # of visible against shadow displacement
  'mismatch',  # k3 of sampler against training forward, nats per token
)
_SMALLEST = 1e-9  # of steps and KL, so that every ratio exists
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T = (
  12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622,
  2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009,
  2.0930,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
  """One run, as far as the claims need it."""

  model: str
  task: str
  arm: str
  multiple: float  # of the base learning rate
  lr: float
  seed: int
  pilot: bool  # sets targets and is judged nowhere
  variant: str  # '' or what else sets it apart, see `plans`
  length: int  # N, steps planned
  skipped: float | None  # steps that a loss scaler skipped
  failed: str | None  # why it ended early
  curves: Mapping[str, np.ndarray]  # float64 [evaluations] of each of `SERIES`

  @classmethod
  def from_json(cls, record: Mapping[str, Any]) -> 'Run':
    """Reads what `to_json` wrote; null becomes NaN."""
    values = dict(record)
    curves = {name: np.array(values.pop(name), float) for name in SERIES}
    return cls(**values, curves=curves)

  def to_json(self) -> dict[str, Any]:
    """JSON with six significant digits; NaN becomes null."""
    values = dataclasses.asdict(self)
    curves = values.pop('curves')
    return values | {
      name: [float(f'{x:.6g}') if math.isfinite(x) else None for x in curve]
      for name, curve in curves.items()
    }

  @property
  def gain(self) -> float:
    """Of reward, from the first to the last point of the isotonic curve."""
    fitted = isotonic(self.curves['reward'])
    return float(fitted[-1] - self.curves['reward'][0])

  def steps_to(self, target: float) -> float:
    """Steps until the isotonic curve reaches a reward; inf if it does not."""
    steps = crossing(self.curves['step'], self.curves['reward'], target)
    return max(steps, _SMALLEST)

  def kl_after(self, step: float) -> float:
    """KL after so many steps, by linear interpolation; inf: at the end."""
    step = min(step, self.curves['step'][-1])
    kl = float(np.interp(step, self.curves['step'], self.curves['kl']))
    return max(kl, _SMALLEST)

  def mean(self, name: str) -> float:
    """Mean over the steps of a series that evaluations summarise."""
    weights = np.diff(self.curves['step'])
    return float(np.average(self.curves[name][1:], weights=weights))


def isotonic(y: Sequence[float]) -> np.ndarray:
  """The non-decreasing sequence nearest to y, by pooling violators.

  >>> isotonic([1.0, 3.0, 2.0, 4.0]).tolist()
  [1.0, 2.5, 2.5, 4.0]
  """
  blocks: list[list[float]] = []  # mean, size
  for value in y:
    blocks.append([float(value), 1])
    while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
      (a, n), (b, m) = blocks[-2:]
      blocks[-2:] = [[(a * n + b * m) / (n + m), n + m]]
  return np.concatenate([np.full(int(n), mean) for mean, n in blocks])


def crossing(
  step: Sequence[float], reward: Sequence[float], target: float
) -> float:
  """First step at which the isotonic curve, joined by lines, is at the target.

  Returns:
    Steps, or inf if the curve stays below.
  """
  fitted = isotonic(reward)
  reached = np.flatnonzero(fitted >= target)
  if not reached.size:
    return math.inf
  i = reached[0]
  if i == 0:
    return float(step[0])
  share = (target - fitted[i - 1]) / (fitted[i] - fitted[i - 1])
  return float(step[i - 1] + share * (step[i] - step[i - 1]))


class Interval(NamedTuple):
  """An estimate from pairs of runs, with a 95 % interval over seeds."""

  estimate: float
  low: float
  high: float
  pairs: int
  unknown: int = 0  # pairs of which a value is only known to be larger
  p: float = math.nan  # two-sided sign test against equality

  def __str__(self) -> str:  # noqa: D105
    sign = '' if not self.unknown else '≥ ' if self.high == math.inf else '≤ '
    return f'{sign}{self.estimate:.3g} [{self.low:.3g}, {self.high:.3g}]'

  def json(self) -> dict[str, Any]:
    """As strict JSON: null for what is not finite."""
    return {
      name: x if math.isfinite(x) else None
      for name, x in self._asdict().items()
    }


def mean_interval(values: Sequence[float]) -> Interval:
  """Mean and Student's t interval; a single value bounds nothing."""
  values = np.asarray(values, float)
  n, mean = values.size, float(values.mean())
  if n == 1:
    return Interval(mean, -math.inf, math.inf, 1)
  quantile = _T[n - 2] if n - 2 < len(_T) else 1.96 + 2.5 / (n - 1)
  half = quantile * float(values.std(ddof=1)) / math.sqrt(n)
  return Interval(mean, mean - half, mean + half, n)


def sign_test(above: int, below: int) -> float:
  """Two-sided p of so many pairs above and below, ties left out."""
  n, k = above + below, min(above, below)
  tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
  return min(1.0, 2 * tail)


def paired_ratio(
  above: Sequence[float], below: Sequence[float], limit: float = math.inf
) -> Interval:
  """Median of above / below, pair by pair; both positive.

  The interval is Student's of the mean logarithm. Where a value is inf, it is
  only known to exceed `limit`: the interval is then the range of what the
  pairs can be (five pairs hold the median with 94 %), and the median takes
  `limit` for the value.
  """
  if len(above) != len(below) or not above:
    raise ValueError(
      f'expected pairs, got {len(above)} values above and {len(below)} below'
    )
  pairs = list(zip(above, below, strict=True))
  least = [min(a, limit) / b for a, b in pairs]  # 0 where b is inf
  most = [a / min(b, limit) for a, b in pairs]
  middle = [min(a, limit) / min(b, limit) for a, b in pairs]
  unknown = sum(math.inf in pair for pair in pairs)
  if unknown:
    low, high = min(least), max(most)
  else:
    _, low, high, *_ = mean_interval(np.log(middle))
    low, high = (math.exp(min(x, 700.0)) for x in (low, high))
  if len(pairs) == 1:
    low, high = 0.0, math.inf
  p = sign_test(sum(x > 1 for x in least), sum(x < 1 for x in most))
  return Interval(float(np.median(middle)), low, high, len(pairs), unknown, p)


def median(values: Sequence[float]) -> float:
  """The median; of an even number of values the upper one, so inf works."""
  return float(sorted(values)[len(values) // 2])


def band(
  runs: Iterable[Run], value: Callable[[Run], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean and 95 % bounds over seeds of a curve, point by point.

  Runs that broke off end the band where the shortest ends.
  """
  curves = [value(run) for run in runs]
  shortest = min(map(len, curves))
  intervals = [
    mean_interval([curve[i] for curve in curves]) for i in range(shortest)
  ]
  mean, low, high = np.array([x[:3] for x in intervals]).T
  if len(curves) == 1:
    low = high = mean
  return mean, low, high
