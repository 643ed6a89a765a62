"""Curves with known answers; every verdict made to pass and to fail."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

from train.reproduce import claims, curves, report
from train.reproduce.claims import FAIL, NOT_RUN, PASS, Group
from train.reproduce.curves import Run

N = 40
STEPS = np.arange(0, N + 1, 4.0)


def make(
  arm='bf16',
  multiple=1.0,
  seed=0,
  *,
  lag=0.0,
  rate=1.0,
  kl=1.0,
  pilot=False,
  variant='',
  changed=0.02,
  failed=None,
):
  """Reward 0.3 + rate * 0.001 a step after a lag; KL proportional to steps."""
  moved = np.maximum(STEPS - lag, 0.0)
  flat = np.full(STEPS.size, np.nan)
  known = np.r_[np.nan, np.ones(STEPS.size - 1)]
  known_curves = dict.fromkeys(curves.SERIES, flat) | {
    'step': STEPS,
    'reward': 0.3 + 0.001 * rate * moved,
    'kl': 0.01 * kl * STEPS,
    'changed': changed * known,
    'least_changed': 0.02 * known,
  }
  return Run(
    model='m',
    task='t',
    arm=arm,
    multiple=multiple,
    lr=1e-6 * multiple,
    seed=seed,
    pilot=pilot,
    variant=variant,
    length=N,
    skipped=None,
    failed=failed,
    curves=known_curves,
  )


PILOT = make('fp32', seed=1000, pilot=True)  # gain 0.04: primary at step 10


def arm(name, seeds=5, **kwargs):
  """Runs over seeds that are almost equal."""
  jitter = np.linspace(-0.1, 0.1, seeds)
  kwargs = {'lag': 0.0} | kwargs
  lag = kwargs.pop('lag')
  return [
    make(name, seed=i, lag=lag + x, **kwargs) for i, x in enumerate(jitter)
  ]


def test_the_isotonic_curve_is_the_nearest_that_does_not_fall():
  assert curves.isotonic([1, 3, 2, 4]).tolist() == [1, 2.5, 2.5, 4]
  assert curves.isotonic([3, 2, 1]).tolist() == [2, 2, 2]
  assert curves.isotonic([1, 1, 2]).tolist() == [1, 1, 2]
  # Against the min-max formula, on random curves with ties.
  rng = np.random.default_rng(0)
  for _ in range(20):
    y = rng.integers(0, 5, 9) / 4
    n = y.size
    want = [
      max(
        min(y[a : b + 1].mean() for b in range(i, n)) for a in range(0, i + 1)
      )
      for i in range(n)
    ]
    np.testing.assert_allclose(curves.isotonic(y), want, atol=1e-12)


@pytest.mark.parametrize(
  ('reward', 'target', 'want'),
  [
    ([0.0, 1.0, 2.0], 1.5, 6.0),  # half of the way from step 4 to 8
    ([0.0, 1.0, 2.0], 1.0, 4.0),  # a point of the curve
    ([0.0, 2.0, 1.0, 3.0], 1.5, 4.0),  # the two in between are one: 1.5
    ([0.0, 2.0, 1.0, 3.0], 1.8, 8.8),  # a peak of noise does not count
    ([0.0, 1.0, 1.0, 1.0], 1.0, 4.0),  # first of ties
    ([0.0, 1.0, 2.0], 2.1, math.inf),
    ([1.0, 2.0, 3.0], 0.5, 0.0),
  ],
)
def test_steps_to_a_target_by_hand(reward, target, want):
  steps = np.arange(len(reward)) * 4.0
  assert curves.crossing(steps, reward, target) == pytest.approx(want)


def test_intervals_are_those_of_student():
  for n in (2, 3, 5, 20):
    x = np.random.default_rng(n).normal(size=n)
    got = curves.mean_interval(x)
    low, high = stats.t.interval(
      0.95, n - 1, loc=x.mean(), scale=x.std(ddof=1) / np.sqrt(n)
    )
    np.testing.assert_allclose(got[:3], [x.mean(), low, high], rtol=1e-4)
  for n in (21, 40, 200):  # past the table, a little too wide or exact
    q = curves.mean_interval(np.r_[-1.0, np.ones(n - 1)])
    x = np.r_[-1.0, np.ones(n - 1)]
    half = (q.high - q.low) / 2 / (x.std(ddof=1) / np.sqrt(n))
    assert half == pytest.approx(stats.t.ppf(0.975, n - 1), rel=4e-3)
  one = curves.mean_interval([3.0])
  assert (one.estimate, one.low, one.high) == (3.0, -math.inf, math.inf)


def test_the_sign_test_counts_all_outcomes():
  for above, below in [(5, 0), (4, 1), (3, 3), (0, 2), (0, 0)]:
    n = above + below
    flips = [sum(f) for f in itertools.product((0, 1), repeat=n)]
    extreme = [abs(k - n / 2) >= abs(above - n / 2) for k in flips]
    assert curves.sign_test(above, below) == pytest.approx(np.mean(extreme))


def test_a_paired_ratio_is_a_median_and_an_interval_of_logarithms():
  got = curves.paired_ratio([2.0, 6.0, 8.0], [1.0, 2.0, 1.0])
  assert got.estimate == 3 and got.unknown == 0 and got.pairs == 3
  logs = np.log([2, 3, 8])
  low, high = stats.t.interval(
    0.95, 2, loc=logs.mean(), scale=logs.std(ddof=1) / np.sqrt(3)
  )
  np.testing.assert_allclose([got.low, got.high], np.exp([low, high]), 1e-4)
  assert got.p == pytest.approx(0.25)
  assert curves.paired_ratio([2.0, 2.0], [2.0, 2.0]).p == 1  # ties say nothing
  alone = curves.paired_ratio([2.0], [1.0])
  assert (alone.low, alone.high) == (0, math.inf)
  with pytest.raises(ValueError, match='got 1 values above and 2 below'):
    curves.paired_ratio([1.0], [1.0, 2.0])


def test_a_run_that_never_arrives_counts_against_the_claim():
  inf = math.inf
  slow = curves.paired_ratio([inf, 30.0, 36.0], [10.0, 10.0, 10.0], limit=40)
  # At least 4, 3, 3.6: the bound below holds, there is none above.
  assert (slow.estimate, slow.low, slow.high) == (3.6, 3.0, inf)
  assert slow.unknown == 1 and slow.p == 0.25
  assert str(slow) == '≥ 3.6 [3, inf]'
  fast = curves.paired_ratio([10.0, 10.0], [inf, 20.0], limit=40)
  assert (fast.estimate, fast.low, fast.high) == (0.375, 0.0, 0.5)
  both = curves.paired_ratio([inf, inf], [inf, inf], limit=40)
  assert (both.estimate, both.low, both.high, both.p) == (1, 0, inf, 1)
  json.dumps(both.json(), allow_nan=False)


def test_targets_come_from_pilots_alone():
  runs = [PILOT, *arm('fp32', rate=9.0)]
  targets = claims.find_targets(runs)
  assert targets.start == pytest.approx(0.3)
  assert targets.gain == pytest.approx(0.04)
  values = [targets.value(share) for share in claims.SHARES]
  assert values == pytest.approx([0.304, 0.31, 0.32])
  assert claims.find_targets(arm('fp32')) is None
  assert claims.find_targets([make('fp32', rate=0.0, pilot=True)]) is None
  assert claims.find_targets(runs, multiple=2.0) is None


def test_pairs_are_of_the_same_seed():
  runs = arm('bf16')[1:] + arm('fp16')[:3]
  pairs = Group([PILOT, *runs]).pairs('bf16', 'fp16')
  assert [(a.seed, b.seed) for a, b in pairs] == [(1, 1), (2, 2)]


def test_the_multiple_of_equal_speed_is_interpolated_in_logarithms():
  # Steps to 0.31 are 10 / rate: 40, 20, 5 at 1, 2, 8 times the rate.
  rates = {1.0: 0.25, 2.0: 0.5, 8.0: 2.0}
  slow = {m: make(multiple=m, rate=r, kl=m) for m, r in rates.items()}
  match = claims.match_speed(make('bf16-sr'), slow, 0.31)
  # 10 is half of the way from 20 to 5, so 4 half of the way from 2 to 8.
  assert match.multiple == pytest.approx(4.0)
  assert match.kl_end == pytest.approx(0.01 * 40 * 4)
  # At the target: KL .01 * 2 * 20 and .01 * 8 * 5, both 0.4.
  assert match.kl_target == pytest.approx(0.4)
  assert claims.match_speed(make(rate=9.0), slow, 0.31) is None
  assert claims.match_speed(make(rate=0.1), slow, 0.31) is None
  already = claims.match_speed(make(rate=0.25), slow, 0.31)
  assert already.multiple == 1.0
  # One that does not arrive counts with N = 40 steps and its last KL.
  slow[1.0] = make(rate=0.1)
  slow[2.0] = make(multiple=2.0, rate=0.1)
  match = claims.match_speed(make('bf16-sr'), slow, 0.31)
  assert match.multiple == pytest.approx(2 * 4 ** (2 / 3))


def judge(claim, *runs):
  found = claims.verdicts(Group([PILOT, *itertools.chain(*runs)]))
  assert [v.claim for v in found] == [
    'a',
    'b',
    'c1',
    'c2',
    'd',
    'e',
    'f1',
    'f2',
  ]
  [verdict] = [v for v in found if v.claim == claim]
  json.dumps(verdict.values, allow_nan=False)
  return verdict.outcome


FP16, FP32 = arm('fp16'), arm('fp32')
SR = arm('bf16-sr')


def test_verdict_a():
  assert judge('a', FP16, arm('bf16', lag=10)) == PASS
  assert judge('a', FP16, arm('bf16', lag=100)) == PASS  # never arrives
  assert judge('a', FP16, arm('bf16', lag=4)) == FAIL
  assert judge('a', FP16, arm('bf16', lag=10)[:1]) == NOT_RUN
  # The median alone is not enough.
  noisy = [make(seed=i, lag=lag) for i, lag in enumerate((-5, 10, 10, 15, 0))]
  assert judge('a', FP16, noisy) == FAIL


def test_verdict_b():
  assert judge('b', FP16, SR) == PASS
  assert judge('b', FP16, arm('bf16-sr', lag=2)) == FAIL
  assert judge('b', FP16, arm('bf16-sr', lag=100)) == FAIL
  assert judge('b', FP16) == NOT_RUN


def larger(kl):
  """bf16 at four rates: the larger, the faster; KL of the end given."""
  return [
    run
    for multiple, lag in ((1.0, 20), (2.0, 10), (4.0, 5), (6.0, -2))
    for run in arm('bf16', multiple=multiple, lag=lag, kl=kl(multiple))
  ]


def test_verdicts_c():
  # As fast as bf16-sr between 4 and 6 times the rate.
  worse, same = larger(lambda m: m), larger(lambda m: 1.0)
  for claim in ('c1', 'c2'):
    assert judge(claim, SR, worse) == PASS
    assert judge(claim, SR, larger(lambda m: 0.5)) == FAIL
    assert judge(claim, SR, worse[:5]) == NOT_RUN
    assert judge(claim, arm('bf16-sr', lag=-4), worse) == FAIL  # never as fast
  assert judge('c1', SR, same) == FAIL
  [verdict, _] = claims.verdicts_c(
    Group([PILOT, *SR, *worse, *FP32, *arm('fp32', multiple=6.0, kl=6.0)])
  )
  multiple = verdict.values['multiple']['estimate']
  assert 4 < multiple < 6
  assert verdict.values['fp32_rate_effect'] == pytest.approx(multiple)


def scaling(scaled=1.0, unscaled=0.1, rounded=1.0, **kwargs):
  return [
    *arm('fp16', 3, rate=scaled, variant=claims.SCALED),
    *arm('fp16', 3, rate=unscaled, variant=claims.UNSCALED, **kwargs),
    *arm('bf16-sr', 3, rate=rounded, variant=claims.BFLOAT16),
  ]


def test_verdict_d():
  assert judge('d', scaling()) == PASS
  assert judge('d', scaling(unscaled=0.0, failed='step 3: inf')) == PASS
  assert judge('d', scaling(unscaled=0.6)) == FAIL  # the scaler is not needed
  assert judge('d', scaling(rounded=0.7)) == FAIL  # SR does not train
  assert judge('d', scaling(scaled=0.0, unscaled=0.0)) == FAIL
  assert judge('d', scaling()[:7]) == NOT_RUN


def test_verdict_e():
  def sticky(**kwargs):
    return arm('bf16-sr-sticky', **kwargs)

  assert judge('e', FP16, sticky()) == PASS
  assert judge('e', FP16, sticky(lag=2)) == FAIL
  assert judge('e', FP16, sticky(changed=0.025)) == FAIL
  assert judge('e', FP16) == NOT_RUN


def test_verdicts_f():
  assert judge('f1', FP32, SR) == PASS
  assert judge('f1', FP32, arm('bf16-sr', lag=1)) == FAIL
  assert judge('f1', FP32, arm('bf16-sr', lag=-1)) == FAIL
  assert judge('f1', FP32, arm('bf16-sr', kl=1.2)) == FAIL
  assert judge('f1', SR) == NOT_RUN
  pilot = [dataclasses.replace(PILOT, multiple=0.1)]
  small = arm('bf16-sr', multiple=0.1)
  assert judge('f2', pilot, small, arm('fp16', multiple=0.1, lag=3)) == PASS
  assert judge('f2', pilot, small, arm('fp16', multiple=0.1)) == FAIL
  assert judge('f2', small, arm('fp16', multiple=0.1, lag=3)) == NOT_RUN
  assert judge('f2', pilot, SR, FP16) == NOT_RUN


def test_without_targets_nothing_is_judged_by_steps():
  group = Group([*FP16, *FP32, *SR, *arm('bf16'), *arm('bf16', multiple=2.0)])
  outcomes = {v.claim: v.outcome for v in claims.verdicts(group)}
  assert set(outcomes.values()) == {NOT_RUN}


def test_the_lag_of_a_constant_delay_is_constant():
  runs = [PILOT, *FP32, *arm('bf16', lag=8), *arm('fp16', lag=25)]
  found = {
    (x.arm, x.share): x for x in claims.lags(Group(runs), ('bf16', 'fp16'))
  }
  assert [found['bf16', s].steps for s in claims.SHARES] == pytest.approx(
    [8, 8, 8], abs=0.4
  )
  # At 50 % it would take 45 of 40 steps.
  assert found['fp16', 0.5].at_least and not found['fp16', 0.25].at_least
  assert found['fp16', 0.5].steps == pytest.approx(20, abs=0.4)


def test_the_map_has_a_target_for_each_rate():
  slow = make('fp32', seed=1000, pilot=True, multiple=0.1, rate=0.1)
  runs = [
    PILOT,
    slow,
    *arm('bf16', lag=4),
    *arm('bf16', 2, multiple=0.1, lag=99),
  ]
  runs += arm('bf16', multiple=3.0)  # no pilot at this rate
  cells = claims.rate_map(Group(runs), ('bf16',))
  assert [(c.multiple, c.seeds) for c in cells] == [(0.1, 2), (1.0, 5)]
  assert cells[1].steps == pytest.approx(14, abs=0.2)
  assert cells[1].kl_target == pytest.approx(0.14, abs=0.002)
  assert cells[0].steps == math.inf and math.isnan(cells[0].kl_target)


def test_the_band_ends_with_the_shortest_run():
  runs = arm('bf16', 3)
  short = {name: x[:4] for name, x in runs[0].curves.items()}
  runs[0] = dataclasses.replace(runs[0], curves=short)
  mean, low, high = curves.band(runs, lambda run: run.curves['kl'])
  assert mean.shape == (4,)
  np.testing.assert_allclose([low, high], [mean, mean], atol=1e-12)


def test_runs_survive_json():
  run = make(failed='step 3: loss nan')
  again = Run.from_json(json.loads(json.dumps(run.to_json(), allow_nan=False)))
  assert dataclasses.replace(again, curves={}) == dataclasses.replace(
    run, curves={}
  )
  for name in curves.SERIES:
    np.testing.assert_allclose(again.curves[name], run.curves[name], 1e-5)


def test_the_report_shows_what_there_is(tmp_path):
  runs = [PILOT, *FP16, *FP32, *SR, *larger(lambda m: m), *scaling()]
  runs += arm('bf16-sr-sticky')
  for m in (0.1, 10.0):
    runs += [dataclasses.replace(PILOT, multiple=m)]
    runs += [
      r for a in ('fp16', 'bf16', 'bf16-sr') for r in arm(a, 2, multiple=m)
    ]
  other = [dataclasses.replace(r, task='u') for r in (*FP16, PILOT)]
  setting = dict(
    model='m', task='t', parameters=1234, lr=1e-6, prompts=3, group=5, steps=N,
    eval_every=4, eval_questions=7, eval_samples=5,
  )  # fmt: skip
  results = {
    'set': 'small',
    'planned': 100,
    'missing': ['m-t-fp16-x1-s9'],
    'hours': 0.5,
    'machine': {'cores': 2, 'memory_gib': 8, 'device': '1 x cpu'},
    'versions': {'jax': '0.0'},
    'settings': [setting],
    'runs': [run.to_json() for run in runs + other],
  }
  folder = tmp_path / 'results'
  folder.mkdir()
  (folder / 'small.json').write_text(report.dump(results))
  (folder / 'speed.json').write_text('{"other": 1}')
  (tmp_path / 'results_notes.md').write_text('A word by hand.')
  text = report.write(tmp_path).read_text()
  for word in ('| (a) |', '| (f2) |', 'm-t-fp16-x1-s9', 'A word by hand.'):
    assert word in text
  assert '**real**: NOT RUN' in text
  figures = {path.name for path in folder.glob('*.png')}
  words = ('speed', 'kl', 'scaling', 'sticking', 'lag', 'map')
  assert figures == {f'small-{w}.png' for w in words} | {
    f'small-m-u-{w}.png' for w in ('speed', 'sticking')
  }
  assert all(f'results/{name}' in text for name in figures)
  # Cells are not torn by a bar within them.
  table = [line for line in text.splitlines() if line.startswith('| (')]
  assert {line.count('|') for line in table} == {5}
