"""Doing the runs: each by `loop.run`, and once; then what the claims need.

A finished run is not repeated and an interrupted one goes on.
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from train import loop
from train.config import Config, ConfigError
from train.reproduce import curves
from train.reproduce.plans import FIRST_PILOT, Planned
from train.run_folder import read_config, read_metrics, settings


def run_all(planned: Sequence[Planned], folder: Path) -> int:
  """Does what is not done yet, with progress over all runs.

  What a single run says goes to `log.txt` in the folder.

  Args:
    planned: in this order.
    folder: of the results.

  Returns:
    How many runs were done now.

  Raises:
    ConfigError: if the folder holds runs of other settings.
    loop.Interrupted: when told to stop; the run's checkpoint is saved.
  """
  left = [run for run in planned if not _check(run).done]
  folder.mkdir(parents=True, exist_ok=True)
  if left:
    machine = json.dumps(_machine(), indent=2) + '\n'
    (folder / 'machine.json').write_text(machine)
  with _progress(len(planned), len(planned) - len(left)) as advance:
    for run in left:
      advance(run.name, 0)
      with (
        open(folder / 'log.txt', 'a') as log,
        contextlib.redirect_stdout(log),
      ):
        _run_one(run)
      advance(run.name, 1)
      gc.collect()  # the compiled functions of a trainer are cyclic
  return len(left)


def _run_one(run: Planned) -> None:
  out = run.config.out
  resume = (out / 'config.json').exists()
  if resume and not (out / 'evaluation_before.json').exists():
    resume = False  # killed before its first step
    shutil.rmtree(out)
  try:
    loop.run(dataclasses.replace(run.config, resume=resume))
  except FloatingPointError as error:  # a result, too
    failure = {'error': str(error)}
    (out / 'failed.json').write_text(json.dumps(failure) + '\n')
  shutil.rmtree(out / 'checkpoints', ignore_errors=True)


def _check(run: Planned) -> Planned:
  """The same run, if its folder holds no other.

  Raises:
    ConfigError: which setting differs.
  """
  if (run.config.out / 'config.json').exists():
    saved, default = read_config(run.config.out), settings(Config())
    now = settings(run.config)
    for field in dataclasses.fields(Config):
      value = now[field.name]
      if field.name in ('out', 'resume'):
        continue
      # A flag that is younger than the run had what is its default now.
      was = saved.get(field.name, default[field.name])
      if was != value:
        raise ConfigError(
          f'{run.config.out}: {field.name} is {was!r}, now '
          f'{value!r}; choose another folder with --results'
        )
  return run


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[str, int], None]]:
  """A bar on a terminal, else a line per run; time left from the mean."""
  console = rich.console.Console(file=sys.stdout)
  bar = rich.progress.Progress(
    rich.progress.TextColumn('run'),
    rich.progress.MofNCompleteColumn(),
    rich.progress.BarColumn(bar_width=24),
    rich.progress.TextColumn('{task.description}'),
    console=console,
    disable=not console.is_terminal,
    redirect_stdout=False,
    redirect_stderr=False,
  )
  shown = bar.add_task('', total=total, completed=done)
  started, finished = time.monotonic(), 0

  def advance(name: str, count: int) -> None:
    nonlocal finished
    finished += count
    left = '?'
    if finished:
      mean = (time.monotonic() - started) / finished
      left = f'{mean * (total - done - finished) / 60:.0f} min'
    bar.update(shown, advance=count, description=f'{name}  left {left}')
    if count and not console.is_terminal:
      text = f'{done + finished}/{total}  {name}  left {left}'
      console.print(text, highlight=False, soft_wrap=True)

  with bar:
    yield advance


def _machine() -> dict[str, Any]:
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30
  device = jax.devices()[0]
  return {
    'cores': os.cpu_count(),
    'memory_gib': round(memory),
    'device': f'{jax.device_count()} x {device.device_kind}',
  }


def collect(planned: Sequence[Planned], folder: Path, name: str) -> dict:
  """What the report needs of the runs that are done.

  Args:
    planned: the whole set; what is missing is counted.
    folder: of the results.
    name: of the set.
  """
  done = [run for run in planned if _check(run).done]
  machine = folder / 'machine.json'
  configs = [read_config(run.config.out) for run in done]
  shared = ('model', 'task', 'lr', 'steps', 'prompts', 'group', 'temperature')
  shared += ('eval_every', 'eval_questions', 'eval_samples', 'parameters')
  settings: dict[tuple, dict] = {}
  seconds = 0.0
  for run, config in zip(done, configs, strict=True):
    values = {key: config[key] for key in shared} | {
      'model': Path(config['model']).name,
      'lr': float(f'{config["lr"] / run.multiple:.3g}'),
    }
    settings.setdefault((values['model'], values['task']), values)
    summary = run.config.out / 'summary.json'
    if summary.exists():
      seconds += json.loads(summary.read_text())['seconds']
  return {
    'set': name,
    'planned': len(planned),
    'missing': [run.name for run in planned if not run.done],
    'hours': round(seconds / 3600, 2),
    'machine': json.loads(machine.read_text()) if machine.exists() else {},
    'versions': configs[0]['versions'] if configs else {},
    'settings': list(settings.values()),
    'runs': [read_run(run).to_json() for run in done],
  }


def read_run(run: Planned) -> curves.Run:
  """A finished run as the claims see it."""
  out, config = run.config.out, run.config
  before = json.loads((out / 'evaluation_before.json').read_text())
  records = read_metrics(out)
  start = dict(step=0, reward=np.mean(before), kl=0.0)
  rows, since = [dict.fromkeys(curves.SERIES, math.nan) | start], 0
  for i, record in enumerate(records):
    if 'eval_reward' not in record:
      continue

    def mean(name: str, block=tuple(records[since : i + 1])) -> float:
      known = [r[name] for r in block if r.get(name) is not None]
      return float(np.mean(known)) if known else math.nan

    row = {
      'step': record['step'],
      'reward': record['eval_reward'],
      'kl': record.get('eval_kl_exact'),
      'kl_step': record.get('eval_kl_step'),
      'changed': mean('changed_fraction'),
      'least_changed': mean('least_changed_fraction'),
      'slope': record.get('displacement_slope'),
      'mismatch': mean('mismatch_k3'),
    }
    rows.append({k: math.nan if v is None else v for k, v in row.items()})
    since = i + 1
  failed = out / 'failed.json'
  return curves.Run(
    model=Path(config.model).name,
    task=config.task,
    arm=config.arm,
    multiple=run.multiple,
    lr=config.lr,
    seed=config.seed,
    pilot=config.seed >= FIRST_PILOT,
    variant=run.variant,
    length=config.steps,
    skipped=records[-1].get('skipped_steps') if records else None,
    failed=json.loads(failed.read_text())['error'] if failed.exists() else None,
    curves={
      name: np.array([row[name] for row in rows], float)
      for name in curves.SERIES
    },
  )
