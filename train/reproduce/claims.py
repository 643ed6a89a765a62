"""The claims, judged: from curves of runs to verdicts, by NumPy alone.

Every comparison is paired by seed: arms of one seed share prompts, sampling
keys and initial weights. Steps to a target may be unknown, because the run
ended before: they are then more than the run's length, and every bound below
takes the value that speaks against the claim.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from train.reproduce.curves import (
  Interval,
  Run,
  mean_interval,
  median,
  paired_ratio,
)

SHARES = (0.10, 0.25, 0.50)  # of the gain of fp32, see `find_targets`
PRIMARY = 0.25
PASS, FAIL, NOT_RUN = 'PASS', 'FAIL', 'NOT RUN'


class Targets(NamedTuple):
  """Rewards to reach, fixed by pilot runs."""

  start: float
  gain: float  # of fp32 over the run
  pilots: int

  def value(self, share: float = PRIMARY) -> float:
    """Start plus a share of the gain."""
    return self.start + share * self.gain


def find_targets(runs: Iterable[Run], multiple: float = 1.0) -> Targets | None:
  """From the fp32 pilots at a multiple of the rate; None if they gain nothing.

  Args:
    runs: of one setting.
    multiple: of the base learning rate.
  """
  pilots = [
    run
    for run in runs
    if run.pilot and run.arm == 'fp32' and run.multiple == multiple
  ]
  if not pilots:
    return None
  start = float(np.mean([run.curves['reward'][0] for run in pilots]))
  gain = float(np.mean([run.gain for run in pilots]))
  return Targets(start, gain, len(pilots)) if gain > 0 else None


class Verdict(NamedTuple):
  """One claim, judged."""

  claim: str
  statement: str
  outcome: str
  numbers: str
  values: dict[str, Any]


class Group:
  """Runs of one setting: a model on a task."""

  def __init__(self, runs: Iterable[Run]):
    """Sorts the runs that count by arm, multiple and variant."""
    self.runs = list(runs)
    self.model, self.task = self.runs[0].model, self.runs[0].task
    self.length = max(run.length for run in self.runs)
    self._found: dict[tuple, dict[int, Run]] = {}
    for run in self.runs:
      if not run.pilot:
        key = run.arm, run.multiple, run.variant
        self._found.setdefault(key, {})[run.seed] = run
    self.targets = find_targets(self.runs)

  def get(
    self, arm: str, multiple: float = 1.0, variant: str = ''
  ) -> dict[int, Run]:
    """The runs of an arm by seed, in the order of seeds."""
    return dict(sorted(self._found.get((arm, multiple, variant), {}).items()))

  def multiples(self, arm: str) -> list[float]:
    """The multiples of the rate at which an arm ran."""
    return sorted(
      m for a, m, variant in self._found if (a, variant) == (arm, '')
    )

  def main_multiples(self, arm: str) -> list[float]:
    """Those that every seed of `bf16-sr` has: the map has fewer seeds."""
    seeds = self.get('bf16-sr').keys()
    return [m for m in self.multiples(arm) if self.get(arm, m).keys() >= seeds]

  def pairs(self, *keys: str | tuple) -> list[tuple[Run, ...]]:
    """The runs of several arms (or arm, multiple, variant), seed by seed."""
    found = [
      self.get(*([key] if isinstance(key, str) else key)) for key in keys
    ]
    seeds = sorted(set.intersection(*map(set, found)))
    return [tuple(runs[seed] for runs in found) for seed in seeds]

  def steps_ratio(
    self, a: str | tuple, b: str | tuple, target: float
  ) -> Interval | None:
    """Of steps to a reward; None without two pairs."""
    pairs = self.pairs(a, b)
    if len(pairs) < 2:
      return None
    steps = [
      [run.steps_to(target) for run in runs]
      for runs in zip(*pairs, strict=True)
    ]
    return paired_ratio(*steps, limit=self.length)


class Match(NamedTuple):
  """The rate at which `bf16` is as fast as another run, and its KL there."""

  multiple: float
  kl_end: float
  kl_target: float


def match_speed(
  fast: Run, slow: Mapping[float, Run], target: float
) -> Match | None:
  """The multiple at which `slow` reaches the target when `fast` does.

  Between two multiples, steps and KL are interpolated as logarithms in the
  logarithm of the multiple. A run that does not arrive counts with its length
  as steps and its last KL as KL at the target: both too small, so that the
  multiple and the KL found are rather too small.

  Args:
    fast: the run to be as fast as.
    slow: runs of the same seed by multiple.
    target: a reward.

  Returns:
    None if `fast` does not arrive, or no multiple is fast enough.
  """
  wanted = fast.steps_to(target)
  if wanted == math.inf:
    return None
  last = None
  for multiple, run in sorted(slow.items()):
    steps = run.steps_to(target)
    point = np.log(
      [
        min(steps, run.length),
        multiple,
        run.kl_after(math.inf),
        run.kl_after(steps),
      ]
    )
    if steps <= wanted:
      if last is None:  # fast enough at the smallest rate
        return Match(*np.exp(point[1:]).tolist())
      share = (last[0] - math.log(wanted)) / (last[0] - point[0])
      return Match(*np.exp(last + share * (point - last))[1:].tolist())
    last = point
  return None


def _not_run(claim: str, statement: str, why: str) -> Verdict:
  return Verdict(claim, statement, NOT_RUN, why, {})


def _judge(
  claim: str, statement: str, passed: bool, numbers: str, **values: Any
) -> Verdict:
  plain = {
    k: v.json() if isinstance(v, Interval) else v for k, v in values.items()
  }
  return Verdict(claim, statement, PASS if passed else FAIL, numbers, plain)


def _p(interval: Interval) -> str:
  unknown = f', {interval.unknown} unknown' if interval.unknown else ''
  return f'{interval.pairs} pairs{unknown}, sign test p = {interval.p:.2g}'


def verdict_a(group: Group) -> Verdict:
  """Is BF16 slower than FP16?"""
  text = 'steps(bf16) / steps(fp16) ≥ 1.5, lower bound above 1.2'
  ratio = _primary_ratio(group, 'bf16', 'fp16')
  if isinstance(ratio, str):
    return _not_run('a', text, ratio)
  passed = ratio.estimate >= 1.5 and ratio.low > 1.2
  return _judge('a', text, passed, f'{ratio}; {_p(ratio)}', ratio=ratio)


def verdict_b(group: Group) -> Verdict:
  """Is BF16 with SR as fast as FP16?"""
  text = 'steps(bf16-sr) / steps(fp16): upper bound ≤ 1.10'
  ratio = _primary_ratio(group, 'bf16-sr', 'fp16')
  if isinstance(ratio, str):
    return _not_run('b', text, ratio)
  return _judge(
    'b', text, ratio.high <= 1.10, f'{ratio}; {_p(ratio)}', ratio=ratio
  )


def verdicts_c(group: Group) -> list[Verdict]:
  """Has BF16, made as fast by a larger rate, more KL than BF16 with SR?"""
  texts = {
    'c1': 'KL(bf16 as fast as bf16-sr) / KL(bf16-sr) after equal steps: lower '
    'bound > 1',
    'c2': 'the same at the reward of the primary target',
  }

  def none(why: str) -> list[Verdict]:
    return [_not_run(claim, text, why) for claim, text in texts.items()]

  if group.targets is None:
    return none(_NO_TARGETS)
  target = group.targets.value()
  slow = {m: group.get('bf16', m) for m in group.main_multiples('bf16')}
  if len(slow) < 2 or 1.0 not in slow:
    return none('needs bf16 at the rate itself and at larger ones')
  seeds = list(group.get('bf16-sr'))
  if len(seeds) < 2:
    return none(_NO_PAIRS)
  found, fast = [], []
  for seed in seeds:
    run = group.get('bf16-sr')[seed]
    match = match_speed(
      run, {m: runs[seed] for m, runs in slow.items()}, target
    )
    if match:
      found.append(match)
      fast.append(run)
  missing = len(seeds) - len(found)
  note = f'; no such multiple for {missing} of {len(seeds)} seeds'
  note = note if missing else ''
  if len(found) < 2:
    return [
      _judge(claim, text, False, note.removeprefix('; '), unmatched=missing)
      for claim, text in texts.items()
    ]
  multiple = mean_interval(np.log([match.multiple for match in found]))
  multiple = Interval(*np.exp(multiple[:3]).tolist(), multiple.pairs)
  verdicts = []
  for claim, text in texts.items():
    if claim == 'c1':
      above = [match.kl_end for match in found]
      below = [run.kl_after(math.inf) for run in fast]
    else:
      above = [match.kl_target for match in found]
      below = [run.kl_after(run.steps_to(target)) for run in fast]
    ratio = paired_ratio(above, below)
    numbers = (
      f'{ratio} at {multiple.estimate:.3g} × the rate; {_p(ratio)}{note}'
    )
    values = {'ratio': ratio, 'multiple': multiple, 'unmatched': missing}
    rate = _rate_effect(group, multiple.estimate, target, claim == 'c1')
    if rate is not None:
      numbers += f'; fp32 at that multiple against fp32: {rate:.3g}'
      values['fp32_rate_effect'] = rate
    verdicts.append(
      _judge(claim, text, ratio.low > 1 and not missing, numbers, **values)
    )
  return verdicts


def _rate_effect(
  group: Group, multiple: float, target: float, at_end: bool
) -> float | None:
  """KL of fp32 at a multiple, interpolated, over its KL at the rate itself."""
  known = group.multiples('fp32')
  if len(known) < 2 or not known[0] <= multiple <= known[-1]:
    return None
  medians = [
    np.median(
      [
        run.kl_after(math.inf if at_end else run.steps_to(target))
        for run in group.get('fp32', m).values()
      ]
    )
    for m in known
  ]
  logs = np.interp(np.log([multiple, 1.0]), np.log(known), np.log(medians))
  return float(np.exp(logs[0] - logs[1]))


# Variants of the runs for (d), by the dtype of their gradients.
SCALED, UNSCALED, BFLOAT16 = 'float16', 'float16, scaler off', 'bfloat16'


def verdict_d(group: Group) -> Verdict:
  """Does FP16 need its loss scaler where BF16 with SR needs none?"""
  text = (
    'gradients in 16 bits: gain(fp16, scaler off) < half of gain(fp16), and '
    'gain(bf16-sr), without scaler, > 0.8 of it, by 95 % bounds'
  )
  triples = group.pairs(
    ('fp16', 1.0, SCALED), ('fp16', 1.0, UNSCALED), ('bf16-sr', 1.0, BFLOAT16)
  )
  if len(triples) < 2:
    return _not_run('d', text, _NO_PAIRS)
  scaled, unscaled, rounded = (
    np.array([run.gain for run in runs]) for runs in zip(*triples, strict=True)
  )
  broken = sum(run.failed is not None for _, run, _ in triples)
  learns = mean_interval(scaled)
  needs = mean_interval(unscaled - 0.5 * scaled)
  trains = mean_interval(rounded - 0.8 * scaled)
  numbers = (
    f'gains: fp16 {scaled.mean():.4f}, scaler off {unscaled.mean():.4f} '
    f'({broken} of {len(triples)} broke off), bf16-sr {rounded.mean():.4f}; '
    f'off - 0.5 fp16 {needs}, bf16-sr - 0.8 fp16 {trains}'
  )
  passed = learns.low > 0 and needs.high < 0 and trains.low > 0
  return _judge(
    'd', text, passed, numbers, learns=learns, needs=needs, trains=trains,
    broken=broken,
  )  # fmt: skip


def verdict_e(group: Group) -> Verdict:
  """Does sticky SR as well, with few changed weights?"""
  text = (
    'steps(bf16-sr-sticky) / steps(fp16): upper bound ≤ 1.10; changed weights '
    '≤ 1.2 × the mean shadow step in grid steps'
  )
  ratio = _primary_ratio(group, 'bf16-sr-sticky', 'fp16')
  if isinstance(ratio, str):
    return _not_run('e', text, ratio)
  runs = group.get('bf16-sr-sticky').values()
  share = mean_interval(
    [run.mean('changed') / run.mean('least_changed') for run in runs]
  )
  changed = float(np.mean([run.mean('changed') for run in runs]))
  return _judge(
    'e',
    text,
    ratio.high <= 1.10 and share.high <= 1.2,
    f'{ratio}; {_p(ratio)}; changed {changed:.2%} a step, {share} × what must',
    ratio=ratio,
    changed_over_least=share,
    changed=changed,
  )


def verdicts_f(group: Group) -> list[Verdict]:
  """Is BF16 with SR the FP32 run, and faster than FP16 at small rates?"""
  text = (
    'steps(bf16-sr) / steps(fp32) within 1 ± 0.05 and KL ratio at the end '
    'within 1 ± 0.10, by 95 % bounds'
  )
  ratio = _primary_ratio(group, 'bf16-sr', 'fp32')
  if isinstance(ratio, str):
    equal = _not_run('f1', text, ratio)
  else:
    pairs = group.pairs('bf16-sr', 'fp32')
    kl = paired_ratio(
      *(
        [run.kl_after(math.inf) for run in runs]
        for runs in zip(*pairs, strict=True)
      )
    )
    passed = 0.95 <= ratio.low <= ratio.high <= 1.05
    passed &= 0.9 <= kl.low <= kl.high <= 1.1
    equal = _judge(
      'f1',
      text,
      passed,
      f'steps {ratio}; KL {kl}; {_p(ratio)}',
      ratio=ratio,
      kl=kl,
    )
  return [equal, _faster_at_small_rates(group)]


def _faster_at_small_rates(group: Group) -> Verdict:
  text = 'at the smallest rate, steps(bf16-sr) / steps(fp16): upper bound < 1'
  rates = [m for m in group.multiples('fp16') if m < 1]
  if not rates:
    return _not_run('f2', text, 'no run below the base rate')
  targets = find_targets(group.runs, rates[0])
  if targets is None:
    return _not_run('f2', text, _NO_TARGETS)
  ratio = group.steps_ratio(
    ('bf16-sr', rates[0]), ('fp16', rates[0]), targets.value()
  )
  if ratio is None:
    return _not_run('f2', text, _NO_PAIRS)
  numbers = f'{ratio} at {rates[0]:.3g} × the rate; {_p(ratio)}'
  return _judge(
    'f2', text, ratio.high < 1, numbers, ratio=ratio, multiple=rates[0]
  )


_NO_TARGETS = 'no pilot of fp32 with a gain'
_NO_PAIRS = 'fewer than two seeds have all the runs'


def _primary_ratio(group: Group, a: str, b: str) -> Interval | str:
  """Of steps to the primary target, or why there is none."""
  if group.targets is None:
    return _NO_TARGETS
  ratio = group.steps_ratio(a, b, group.targets.value())
  return _NO_PAIRS if ratio is None else ratio


def verdicts(group: Group) -> list[Verdict]:
  """All claims on one setting."""
  return [
    verdict_a(group),
    verdict_b(group),
    *verdicts_c(group),
    verdict_d(group),
    verdict_e(group),
    *verdicts_f(group),
  ]


def split(runs: Iterable[Run]) -> list[Group]:
  """The settings, in the order in which they first appear."""
  groups: dict[tuple[str, str], list[Run]] = {}
  for run in runs:
    groups.setdefault((run.model, run.task), []).append(run)
  return [Group(members) for members in groups.values()]


class Lag(NamedTuple):
  """How many steps an arm is behind fp32 at a target."""

  arm: str
  share: float  # of the gain
  steps: float  # median over pairs
  at_least: bool  # some run of the arm does not arrive


def lags(group: Group, arms: Sequence[str]) -> list[Lag]:
  """Lag in steps behind fp32 of the same seed, for every target."""
  found = []
  for arm in arms:
    pairs = group.pairs(arm, 'fp32')
    if group.targets is None or not pairs:
      continue
    for share in SHARES:
      target = group.targets.value(share)
      steps = [(a.steps_to(target), b.steps_to(target)) for a, b in pairs]
      known = [(a, b) for a, b in steps if b < math.inf]
      if known:
        behind = [min(a, group.length) - b for a, b in known]
        unknown = any(a == math.inf for a, _ in known)
        found.append(Lag(arm, share, float(np.median(behind)), unknown))
  return found


class Cell(NamedTuple):
  """An arm at one learning rate of the map; medians over seeds."""

  arm: str
  multiple: float
  lr: float
  steps: float  # to the primary target of this rate; inf: not reached
  kl_target: float  # where it was reached; NaN: nowhere
  kl_end: float
  gain: float
  seeds: int


def rate_map(group: Group, arms: Sequence[str]) -> list[Cell]:
  """Steps to target and KL for each rate that has a pilot of its own."""
  cells = []
  for arm in arms:
    for multiple in group.multiples(arm):
      targets = find_targets(group.runs, multiple)
      runs = list(group.get(arm, multiple).values())
      if targets is None or not runs:
        continue
      target = targets.value()
      steps = [run.steps_to(target) for run in runs]
      reached = [
        run.kl_after(s)
        for run, s in zip(runs, steps, strict=True)
        if s < math.inf
      ]
      cells.append(
        Cell(
          arm,
          multiple,
          runs[0].lr,
          median(steps),
          median(reached) if reached else math.nan,
          median([run.kl_after(math.inf) for run in runs]),
          median([run.gain for run in runs]),
          len(runs),
        )
      )
  return cells
