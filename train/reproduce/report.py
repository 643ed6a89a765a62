"""Results as documents: tables, figures and `results.md`, from JSON alone."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from train.reproduce import claims, curves
from train.reproduce.claims import Group, Verdict
from train.reproduce.curves import Run

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is set

_FIRST = ('small', 'real')  # the order of the sets; others follow
_ARMS = {
  'fp32': '0.4',
  'fp16': 'C0',
  'bf16': 'C3',
  'bf16-sr': 'C2',
  'bf16-sr-sticky': 'C1',
  'bf16-pure': 'C5',
  'bf16-sr-pure': 'C4',
}
_QUESTION = """\
In reinforcement learning with verifiable rewards at low learning rates, does
rounding the FP32 shadow weights to BF16 *stochastically* (`bf16-sr`) close the
gap in speed between BF16 and FP16, and does it do so with less KL divergence
from the reference than BF16 at a larger learning rate?
"""
_PROTOCOL = """\
1. Arms differ in how the visible weights are stored and rounded, and in
   nothing else but the learning rate named; nothing is tuned for an arm.
2. All arms of a seed share the initial weights (on the BF16 grid), prompts and
   sampling keys. Seeds are 0..n-1; comparisons are paired by seed.
3. Dr.GRPO, AdamW (0.9, 0.95), no weight decay, clipping at a norm of 1, one
   update a rollout, no KL penalty.
4. The base learning rate of the character models is where
   `sr_optax.forecast_sticking` says that a steady step moves 2 % of the BF16
   weights under round-to-nearest; it was not tried out. SmolLM2: 2e-6.
5. Reward: the exact probability of a right answer on held-out questions.
6. Targets: the start plus 10, 25 (primary) and 50 % of the gain of `fp32` in
   pilot runs (seeds from 1000 on), which are judged nowhere.
7. Steps to a target: first crossing of the isotonic curve, linear between
   evaluations. A run that does not cross counts as more than its length.
8. KL: full-vocabulary KL(policy || reference), summed over sampled completions
   of the held-out prompts, nats per completion.
9. Ratios: median over seeds, 95 % Student interval of the mean logarithm, and
   a sign test; with a run that does not cross, the range over seeds instead.
10. Activations and gradients are FP32 in every arm (on CPUs 16-bit products
    are emulated), except for claim (d).
"""
_NOT_SHOWN = """\
- Models beyond 135M parameters, long completions, thousands of steps, replay
  of a rollout for several updates, asynchronous rollouts.
- 16-bit matrix products: all but claim (d) compute in FP32 on weights that lie
  on the arm's grid, so mismatch between a rollout engine and training is
  nearly absent here.
- The original SmolLM2: its weights are a 4-bit copy, dequantised and put on
  the BF16 grid.
- Claim (d) sees a small reward scale stand for the small gradients of a very
  large batch.
"""


def dump(results: dict[str, Any]) -> str:
  """Results as JSON, a run per line."""
  head = {name: x for name, x in results.items() if name != 'runs'}
  text = json.dumps(head, indent=1, allow_nan=False).removesuffix('\n}')
  runs = ',\n'.join(
    json.dumps(run, allow_nan=False, separators=(',', ':'))
    for run in results['runs']
  )
  return f'{text},\n "runs": [\n{runs}\n]}}\n'


def groups(results: dict[str, Any]) -> list[Group]:
  """The settings of a set of results."""
  return claims.split(Run.from_json(run) for run in results['runs'])


def verdict_table(results: dict[str, Any]) -> str:
  """Markdown: claims that were run, one table for each setting."""
  parts = []
  for group in groups(results):
    verdicts = claims.verdicts(group)
    parts.append(
      f'**{results["set"]}: {group.model} on {group.task}**'
      f'{_targets(group)}\n\n{_table(verdicts)}'
    )
  return '\n\n'.join(parts) or 'No run is done yet.'


def _targets(group: Group) -> str:
  targets = group.targets
  if targets is None:
    return ', no targets yet'
  return (
    f' (start {targets.start:.4f}, gain of fp32 {targets.gain:.4f} in '
    f'{group.length} steps, primary target {targets.value():.4f})'
  )


def _table(verdicts: Iterable[Verdict]) -> str:
  rows = ['| claim | | verdict | numbers |', '| --- | --- | --- | --- |']
  rows += [
    f'| ({v.claim}) | {v.statement} | {v.outcome} | {v.numbers} |'
    for v in verdicts
  ]
  return '\n'.join(rows)


def write(docs: Path) -> Path:
  """Writes `results.md` and the figures from `results/*.json`.

  `results_notes.md`, if it is there, is taken over under its own heading.

  Returns:
    The path of the document.
  """
  folder = docs / 'results'
  folder.mkdir(parents=True, exist_ok=True)
  found = [json.loads(path.read_text()) for path in folder.glob('*.json')]
  sets = {x['set']: x for x in found if isinstance(x, dict) and 'set' in x}
  order = {name: i for i, name in enumerate(_FIRST)}
  names = sorted(sets, key=lambda name: (order.get(name, len(order)), name))
  parts = ['# Results\n\nWritten by `python -m train.reproduce --report`.']
  parts += [f'## The question\n\n{_QUESTION}']
  tables = [verdict_table(sets[name]) for name in names]
  tables += [f'**{n}**: NOT RUN' for n in _FIRST if n not in sets]
  parts += ['## Verdicts\n\n' + '\n\n'.join(tables)]
  parts += [f'## Protocol\n\n{_PROTOCOL}']
  for name in names:
    parts += [_set_section(sets[name], folder)]
  hints = [hint for name in names for hint in _hints(sets[name])]
  parts += ['## What stands out\n\n' + '\n'.join(hints or ['- Nothing yet.'])]
  notes = docs / 'results_notes.md'
  if notes.exists():
    parts += [f'## Notes\n\nBy hand.\n\n{notes.read_text().strip()}']
  parts += [f'## What was not shown\n\n{_NOT_SHOWN}']
  parts += ['## Run it again\n\n' + _commands(sets, names)]
  path = docs / 'results.md'
  path.write_text('\n\n'.join(part.strip() for part in parts) + '\n')
  return path


def _commands(sets: dict[str, Any], names: Sequence[str]) -> str:
  lines = [
    '```sh',
    'python -m train.reproduce --quick          # four arms, three seeds',
    'python -m train.reproduce                  # the small set',
    'python -m train.reproduce --set real       # SmolLM2-135M',
    'python -m train.reproduce --report         # this document',
    '```',
    '',
    'A finished run is not repeated; an interrupted set goes on where it was.',
    '',
    '| set | runs | hours | machine | versions |',
    '| --- | --- | --- | --- | --- |',
  ]
  for name in names:
    x = sets[name]
    machine = x.get('machine') or {}
    versions = ', '.join(f'{k} {v}' for k, v in x.get('versions', {}).items())
    cores, memory = machine.get('cores', '?'), machine.get('memory_gib', '?')
    lines.append(
      f'| {name} | {len(x["runs"])} of {x["planned"]} | {x["hours"]} | {cores} '
      f'cores, {memory} GiB, {machine.get("device", "?")} | {versions} |'
    )
  for name in names:
    missing = sets[name]['missing']
    if missing:
      lines += [
        '',
        f'Missing of {name}: {", ".join(f"`{m}`" for m in missing)}',
      ]
  return '\n'.join(lines)


def _set_section(results: dict[str, Any], folder: Path) -> str:
  name, found = results['set'], groups(results)
  lines = [f'## Set `{name}`', '', _settings(results)]
  for i, group in enumerate(found):
    lines += ['', f'### {group.model} on {group.task}']
    stem = name if i == 0 else f'{name}-{group.model}-{group.task}'
    for title, draw in _FIGURES:
      figure = draw(group)
      if figure is None:
        continue
      word = draw.__name__.removeprefix('_draw_')
      file = folder / f'{stem}-{word}.png'
      figure.savefig(file, dpi=80)
      plt.close(figure)
      lines += ['', f'{title}', '', f'![{title}](results/{file.name})']
    if cells := claims.rate_map(group, ('fp16', 'bf16', 'bf16-sr')):
      lines += ['', _map_table(cells)]
  return '\n'.join(lines)


def _settings(results: dict[str, Any]) -> str:
  rows = [
    '| model | task | parameters | learning rate | samples a step | steps | '
    'evaluated every | held-out questions × samples |',
    '| --- | --- | --- | --- | --- | --- | --- | --- |',
  ]
  rows += [
    f'| {s["model"]} | {s["task"]} | {s["parameters"]:,} | '
    f'{s["lr"]:.3g} | {s["prompts"]} × {s["group"]} | {s["steps"]} | '
    f'{s["eval_every"]} | {s["eval_questions"]} × {s["eval_samples"]} |'
    for s in results['settings']
  ]
  return '\n'.join(rows)


def _map_table(cells: Sequence[claims.Cell]) -> str:
  rows = [
    '| learning rate | arm | steps to 25 % of the gain of fp32 | KL there | '
    'KL at the end | gain | seeds |',
    '| --- | --- | --- | --- | --- | --- | --- |',
  ]
  for c in sorted(cells, key=lambda c: (c.multiple, c.arm)):
    steps = 'not reached' if c.steps == math.inf else f'{c.steps:.1f}'
    kl = 'n/a' if math.isnan(c.kl_target) else f'{c.kl_target:.3g}'
    rows.append(
      f'| {c.lr:.3g} ({c.multiple:.3g} ×) | {c.arm} | {steps} | {kl} | '
      f'{c.kl_end:.3g} | {c.gain:.4f} | {c.seeds} |'
    )
  return '\n'.join(rows)


def _draw_bands(
  ax, group: Group, keys: Iterable[tuple], value: Callable[[Run], np.ndarray]
) -> None:
  for arm, multiple, label, color in keys:
    runs = list(group.get(arm, multiple).values())
    if not runs:
      continue
    mean, low, high = curves.band(runs, value)
    if np.isnan(mean).all():
      continue
    step = min((run.curves['step'] for run in runs), key=len)
    # On top and dashed: what equals fp32 would hide it.
    style = {'linestyle': '--', 'zorder': 3} if arm == 'fp32' else {}
    ax.plot(step, mean, color=color, label=label, **style)
    if len(runs) > 2:
      ax.fill_between(step, low, high, color=color, alpha=0.15, linewidth=0)
  ax.set_xlabel('step')


def _plain(*arms: str) -> list[tuple]:
  return [(arm, 1.0, arm, _ARMS[arm]) for arm in arms]


def _show(name: str) -> Callable[[Run], np.ndarray]:
  return lambda run: run.curves[name]


def _axes(count: int):
  return plt.subplots(
    1, count, figsize=(5.2 * count, 3.9), layout='constrained', squeeze=False
  )


def _draw_speed(group: Group):
  """(a), (b), (e), (f): reward and KL against steps."""
  figure, [[reward, kl]] = _axes(2)
  keys = _plain(*_ARMS)
  _draw_bands(reward, group, keys, _show('reward'))
  _draw_bands(kl, group, keys, _show('kl'))
  if not reward.lines:
    plt.close(figure)
    return None
  if group.targets is not None:
    for share in claims.SHARES:
      reward.axhline(
        group.targets.value(share), color='0.7', linestyle=':', zorder=0
      )
  reward.set(title='Expected reward (dotted: targets)', ylabel='reward')
  kl.set(title='KL to the reference', ylabel='nats per completion')
  reward.legend(fontsize=8)
  return figure


def _draw_kl(group: Group):
  """(c): what a larger rate buys and costs."""
  if group.targets is None or len(group.main_multiples('bf16')) < 2:
    return None
  target = group.targets.value()
  figure, axes = _axes(3)
  measures = (
    ('Steps to the primary target', 'steps', lambda r: r.steps_to(target)),
    ('KL after all steps', 'nats', lambda r: r.kl_after(math.inf)),
    (
      'KL at the primary target',
      'nats',
      lambda r: r.kl_after(s) if (s := r.steps_to(target)) < math.inf else s,
    ),
  )
  for ax, (title, unit, measure) in zip(axes[0], measures, strict=True):
    for arm in ('bf16', 'fp32', 'bf16-sr'):
      multiples = [m for m in group.main_multiples(arm) if m >= 1]
      values = np.full((len(multiples), 3), np.nan)
      for i, m in enumerate(multiples):
        found = [measure(run) for run in group.get(arm, m).values()]
        values[i] = curves.median(found), min(found), max(found)
      values[np.isinf(values)] = np.nan
      if arm == 'bf16-sr':
        if multiples and multiples[0] == 1 and np.isfinite(values[0, 0]):
          ax.axhline(values[0, 0], color=_ARMS[arm], label=arm)
          ax.axhspan(*values[0, 1:], color=_ARMS[arm], alpha=0.15, linewidth=0)
        continue
      if multiples:
        ax.plot(multiples, values[:, 0], 'o-', color=_ARMS[arm], label=arm)
        ax.fill_between(
          multiples, *values[:, 1:].T, color=_ARMS[arm], alpha=0.15, linewidth=0
        )
    ax.set(title=title, ylabel=unit, xlabel='multiple of the rate')
    ax.set(xscale='log', yscale='log')
    known = sorted(
      {m for arm in _ARMS for m in group.main_multiples(arm) if m >= 1}
    )
    ax.set_xticks(known, [f'{m:g}' if m != 1.5 else '' for m in known])
    ax.tick_params(axis='x', which='minor', bottom=False, labelbottom=False)
  axes[0][0].legend(fontsize=8)
  return figure


def _draw_scaling(group: Group):
  """(d): 16-bit gradients with and without a loss scaler."""
  variants = (
    ('fp16', claims.SCALED, 'fp16, scaler', 'C0'),
    ('fp16', claims.UNSCALED, 'fp16, scaler off', 'C3'),
    ('bf16-sr', claims.BFLOAT16, 'bf16-sr, no scaler', 'C2'),
  )
  figure, [[ax]] = _axes(1)
  for arm, variant, label, color in variants:
    if runs := list(group.get(arm, 1.0, variant).values()):
      mean, low, high = curves.band(runs, _show('reward'))
      step = min((run.curves['step'] for run in runs), key=len)
      ax.plot(step, mean, color=color, label=label, marker='.')
      if len(runs) > 2:
        ax.fill_between(step, low, high, color=color, alpha=0.15, linewidth=0)
  if not ax.lines:
    plt.close(figure)
    return None
  ax.set(title='Small gradients in 16 bits', xlabel='step', ylabel='reward')
  ax.legend(fontsize=8)
  return figure


def _draw_sticking(group: Group):
  """(e): which weights change, and how far the visible ones lag."""
  keys = _plain('fp16', 'bf16', 'bf16-sr', 'bf16-sr-sticky')
  figure, [[changed, slope, noise]] = _axes(3)
  _draw_bands(changed, group, keys, lambda r: 100 * r.curves['changed'])
  sticky = [('bf16-sr-sticky', 1.0, '1.2 × least', '0.2')]
  _draw_bands(changed, group, sticky, lambda r: 120 * r.curves['least_changed'])
  _draw_bands(slope, group, keys, _show('slope'))
  _draw_bands(noise, group, _plain('fp32') + keys, _show('kl_step'))
  if not changed.lines:
    plt.close(figure)
    return None
  changed.set(title='Weights changed by a step', ylabel='%', yscale='log')
  slope.set(title='Visible against shadow displacement', ylabel='slope')
  noise.set(title='KL from one policy to the next', ylabel='nats')
  noise.set_yscale('log')
  changed.legend(fontsize=8)
  return figure


def _draw_lag(group: Group):
  """Lag in steps behind fp32, for each target."""
  found = claims.lags(group, ('fp16', 'bf16', 'bf16-sr', 'bf16-sr-sticky'))
  if not found:
    return None
  figure, [[ax]] = _axes(1)
  for arm in dict.fromkeys(lag.arm for lag in found):
    own = [lag for lag in found if lag.arm == arm]
    x, y = [100 * lag.share for lag in own], [lag.steps for lag in own]
    ax.plot(x, y, 'o-', color=_ARMS[arm], label=arm)
    bound = [
      (a, b) for a, b, lag in zip(x, y, own, strict=True) if lag.at_least
    ]
    for a, b in bound:
      ax.annotate('≥', (a, b), textcoords='offset points', xytext=(5, 4))
  ax.axhline(0, color='0.7', linewidth=1)
  ax.set(
    title='Lag behind fp32 (≥: a run did not arrive)',
    xlabel='target, % of the gain of fp32',
    ylabel='steps',
  )
  ax.legend(fontsize=8)
  return figure


def _draw_map(group: Group):
  """The map: where the gap opens and where it closes."""
  cells = claims.rate_map(group, ('fp16', 'bf16', 'bf16-sr'))
  if len({cell.multiple for cell in cells}) < 2:
    return None
  figure, [[steps, kl]] = _axes(2)
  for arm in dict.fromkeys(cell.arm for cell in cells):
    own = sorted((c for c in cells if c.arm == arm), key=lambda c: c.lr)
    rates = [c.lr for c in own]
    line = dict(color=_ARMS[arm], marker='o', label=arm)
    known = [c.steps if c.steps < math.inf else math.nan for c in own]
    steps.plot(rates, known, **line)
    lost = [c.lr for c in own if c.steps == math.inf]
    steps.plot(lost, [group.length] * len(lost), 'x', color=_ARMS[arm])
    kl.plot(rates, [c.kl_end for c in own], **line)
    kl.plot(rates, [c.kl_target for c in own], '--', color=_ARMS[arm])
  steps.set(
    title="Steps to 25 % of fp32's gain at the same rate (×: not reached)",
    ylabel='steps',
  )
  kl.set(title='KL at the end (dashed: at the target)', ylabel='nats')
  for ax in (steps, kl):
    ax.set(xscale='log', yscale='log', xlabel='learning rate')
  steps.title.set_fontsize(9)
  steps.legend(fontsize=8)
  return figure


_FIGURES = (
  ('Claims (a), (b), (e), (f): speed', _draw_speed),
  ('Claim (c): BF16 at larger rates', _draw_kl),
  ('Claim (d): no loss scaling', _draw_scaling),
  ('Claim (e): changed weights, sticking and noise', _draw_sticking),
  ('Lag', _draw_lag),
  ('The map: learning rates', _draw_map),
)


def _hints(results: dict[str, Any]) -> list[str]:
  """Computed pointers to what a reader should look at."""
  lines = []
  for group in groups(results):
    where = f'{results["set"]}, {group.model} on {group.task}'
    failed = [
      v.claim for v in claims.verdicts(group) if v.outcome == claims.FAIL
    ]
    if failed:
      lines.append(f'- {where}: not confirmed: {", ".join(failed)}.')
    shares = [
      f'{arm} {100 * np.mean([run.mean("changed") for run in runs]):.2g} %'
      for arm in _ARMS
      if (runs := [r for r in group.get(arm).values() if r.failed is None])
    ]
    if shares:
      lines.append(f'- {where}: weights changed a step: {", ".join(shares)}.')
    noise = []
    for arm in _ARMS:
      series = [run.curves['kl_step'] for run in group.get(arm).values()]
      known = [np.nanmedian(x) for x in series if not np.isnan(x).all()]
      if known:
        noise.append(f'{arm} {np.median(known):.2g}')
    if noise:
      lines.append(
        f'- {where}: KL from one policy to the next, nats: {", ".join(noise)}.'
      )
    broken = [run for run in group.runs if run.failed]
    if broken:
      lines.append(f'- {where}: {len(broken)} runs broke off.')
    skipped = sum(run.skipped or 0 for run in group.runs)
    if skipped:
      lines.append(
        f'- {where}: {skipped:.0f} steps skipped by the loss scaler.'
      )
  return lines
