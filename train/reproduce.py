"""`python -m train.reproduce`: the claim, run arm by arm and judged.

Thin: it names the runs, passes each to `loop.run`, and keeps what the claims
need. A finished run is not repeated and an interrupted one goes on.
"""

import contextlib
import dataclasses
import fnmatch
import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

# As in `train.__main__`: on a GPU, bits repeat with deterministic kernels only.
_FLAG = ' --xla_gpu_deterministic_ops=true'
if _FLAG not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + _FLAG

import jax  # noqa: E402 - it reads XLA_FLAGS when it is imported
import numpy as np  # noqa: E402
import rich.console  # noqa: E402
import rich.progress  # noqa: E402
import tyro  # noqa: E402

import sr_optax  # noqa: E402
from train import claims, curves, loop, policy, report, tasks, warmup  # noqa: E402
from train.config import Config, ConfigError  # noqa: E402
from train.pretrained import PretrainedError  # noqa: E402
from train.run_folder import read_config, read_metrics, settings  # noqa: E402

SETS = ('small', 'real', 'quick')
CORE = ('fp16', 'bf16', 'bf16-sr', 'bf16-sr-sticky')
FIRST_PILOT = 1000  # seeds from here on set targets and are judged nowhere
# RN shall move this share of the weights in one steady step from their grid.
# It grows in jumps, with the exponents of the weights: 2 % is the last jump
# within 0.5-3 %, and leaves BF16 a chance to move at all in a short run.
MOVED = 0.02
# (d): rewards, and with them gradients, as small as in a batch of a million
# tokens, where float16 underflows. Adam itself does not see the scale.
SMALL_REWARD = 2.0**-10
MAP = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)  # multiples of the learning rate


@dataclasses.dataclass(frozen=True)
class Arguments:
  """Runs every arm of the experiment, or what is left of it, and judges it."""

  set: Literal['small', 'real', 'quick'] = 'small'
  """small: character models, the whole experiment; real: SmolLM2-135M; quick:
  four arms of small."""
  quick: bool = False
  """The same as --set quick."""
  results: Path | None = None
  """Folder of the runs; default: runs/reproduce-SET."""
  only: str = '*'
  """Only runs whose names match this pattern, such as '*-s0'."""
  list: bool = False
  """Print the names of the runs and whether they are done; run nothing."""
  report: bool = False
  """Run nothing; write results and figures into --docs."""
  docs: Path = Path('docs')
  """Gets results.md, and results/ with figures and numbers."""


class Planned(NamedTuple):
  """A run to be done, and how the claims call it."""

  name: str
  config: Config  # its `out` is the run folder
  multiple: float
  variant: str = ''

  @property
  def done(self) -> bool:
    """Whether it ran to its end, or as far as it can."""
    return any((self.config.out / name).exists() for name in _LAST_FILES)


_LAST_FILES = ('summary.json', 'failed.json')


class Setting:
  """A model on a task, and what all its runs share."""

  def __init__(self, folder: Path, base: Config):
    """Plans into a folder.

    Args:
      folder: of the results.
      base: model, task, learning rate and cadences of every run.
    """
    self._folder, self._base = folder, base

  def runs(
    self,
    arms: Sequence[str],
    seeds: Sequence[int],
    multiples: Sequence[float] = (1.0,),
    variant: str = '',
    **changes: Any,
  ) -> list[Planned]:
    """Arms times multiples times seeds, a seed after the other."""
    base, planned = self._base, []
    for seed in seeds:
      for multiple in multiples:
        for arm in arms:
          words = [Path(base.model).name, base.task, arm, f'x{multiple:.3g}']
          words += [variant.replace(', ', '-').replace(' ', '-')] * bool(
            variant
          )
          name = '-'.join([*words, f's{seed}'])
          config = dataclasses.replace(
            base,
            arm=arm,
            lr=float(f'{base.lr * multiple:.4g}'),
            seed=seed,
            out=self._folder / 'runs' / name,
            **changes,
          )
          planned.append(Planned(name, config, multiple, variant))
    return planned

  def pilots(self, count: int, multiple: float = 1.0) -> list[Planned]:
    """The fp32 runs that fix the targets."""
    seeds = range(FIRST_PILOT, FIRST_PILOT + count)
    return self.runs(['fp32'], seeds, [multiple])


def base_rate(model: str, task: tasks.Task, share: float = MOVED) -> float:
  """The rate at which a steady Adam step moves a share of BF16 weights.

  By bisection of `sr_optax.forecast_sticking`, before any training; two
  digits, rounded up.
  """
  params = policy.load_policy(model, task).params
  low, high = 1e-9, 1e-1
  while high / low > 1.001:
    middle = math.sqrt(low * high)
    forecast = sr_optax.forecast_sticking(params, middle, betas=(0.9, 0.95))
    if forecast.total.bfloat16.steady >= share:
      high = middle
    else:
      low = middle
  digit = 10.0 ** (math.floor(math.log10(high)) - 1)
  return float(f'{math.ceil(high / digit) * digit:.2g}')


def _small(folder: Path, model: str, task: str, steps: int = 64) -> Setting:
  rate = base_rate(model, tasks.load_task(task))
  base = Config(
    model=model,
    task=task,
    steps=steps,
    prompts=32,
    group=8,
    max_new_tokens=5,
    lr=rate,
    eval_every=2,
    eval_questions=96,
    eval_samples=8,
    compute_dtype='float32',
    save_final=False,
  )
  return Setting(folder, base)


def plan_small(folder: Path) -> list[Planned]:
  """The whole experiment on character models."""
  main, seeds = _small(folder, 'tiny', 'addition'), range(5)
  every = ('fp32', *CORE, 'bf16-pure', 'bf16-sr-pure')
  planned = main.pilots(3)
  for seed in seeds:  # a seed after the other: what is done can be compared
    planned += main.runs(every, [seed])
    planned += main.runs(['bf16'], [seed], (1.5, 2.0, 3.0, 4.0, 6.0))
    planned += main.runs(['fp32'], [seed], (2.0, 4.0))
  planned += _scaling(main, range(3))
  for model, task in (('tiny', 'arithmetic'), ('tiny-wide', 'addition')):
    other = _small(folder, model, task)
    planned += other.pilots(2) + other.runs(CORE, range(3))
  for multiple in MAP:
    planned += main.pilots(2, multiple)
    planned += main.runs(('fp16', 'bf16', 'bf16-sr'), range(2), [multiple])
  planned += main.runs(('fp16', 'bf16-sr'), range(5), MAP[:1])  # (f2)
  return _distinct(planned)


def _scaling(setting: Setting, seeds: Sequence[int]) -> list[Planned]:
  """(d): small gradients in 16 bits, with and without the scaler."""
  planned = []
  for arm, variant, dtype, scaler in (
    ('fp16', claims.SCALED, 'float16', 'auto'),
    ('fp16', claims.UNSCALED, 'float16', 'off'),
    ('bf16-sr', claims.BFLOAT16, 'bfloat16', 'off'),
  ):
    planned += setting.runs(
      [arm],
      seeds,
      variant=variant,
      compute_dtype=dtype,
      loss_scaler=scaler,
      reward_scale=SMALL_REWARD,
    )
  return planned


def plan_quick(folder: Path) -> list[Planned]:
  """Four arms, three seeds."""
  setting = _small(folder, 'tiny', 'addition')
  planned = setting.pilots(2)
  for seed in range(3):
    planned += setting.runs(('fp16', 'bf16', 'bf16-sr'), [seed])
    planned += setting.runs(['bf16'], [seed], [3.0])
  return planned


def plan_real(folder: Path) -> list[Planned]:
  """SmolLM2-135M on two tasks."""
  planned = []
  for task, arms, multiples in (
    ('arithmetic', ('fp32', *CORE), (2.0, 5.0, 10.0)),
    ('simple_equations', CORE, ()),
  ):
    setting = Setting(
      folder,
      Config(
        model='smollm2',
        task=task,
        steps=30,
        lr=2e-6,
        eval_every=5,
        eval_questions=24,
        eval_samples=8,
        compute_dtype='float32',
        save_final=False,
      ),
    )
    planned += setting.pilots(2)
    for seed in range(3):
      planned += setting.runs(arms, [seed])
      planned += setting.runs(['bf16'], [seed], multiples)
  return planned


PLANS: dict[str, Callable[[Path], list[Planned]]] = {
  'small': plan_small,
  'real': plan_real,
  'quick': plan_quick,
}


def _distinct(planned: Sequence[Planned]) -> list[Planned]:
  return list({run.name: run for run in planned}.values())


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


def reproduce(
  planned: Sequence[Planned], folder: Path, name: str, only: str = '*'
) -> int:
  """Runs a set and prints its verdicts; returns how many runs were done."""
  chosen = [run for run in planned if fnmatch.fnmatch(run.name, only)]
  if not chosen:
    raise ConfigError(f'no run is called {only}; --list names them')
  count = run_all(chosen, folder)
  results = collect(planned, folder, name)
  (folder / f'{name}.json').write_text(report.dump(results))
  print(report.verdict_table(results))
  return count


def write_report(
  planned: Sequence[Planned], folder: Path, name: str, docs: Path
) -> Path:
  """Copies a set's results into the documents and draws all sets anew."""
  if folder.exists():
    results = collect(planned, folder, name)
    kept = docs / 'results' / f'{name}.json'
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(report.dump(results))
  return report.write(docs)


def main() -> int:
  """Parses the command line and runs; codes as `python -m train`."""
  arguments = tyro.cli(Arguments, prog='python -m train.reproduce')
  name = 'quick' if arguments.quick else arguments.set
  folder = arguments.results or Path('runs') / f'reproduce-{name}'
  # Runs share their programs: arms at other rates, and later runs.
  compiled = str(warmup.cache_folder() / 'compiled')
  jax.config.update('jax_compilation_cache_dir', compiled)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)
  try:
    if arguments.report and not folder.exists():
      print(report.write(arguments.docs))
      return 0
    planned = PLANS[name](folder)
    if arguments.list:
      for run in planned:
        if fnmatch.fnmatch(run.name, arguments.only):
          print(f'{run.name:48} {"done" if run.done else "to do"}')
    elif arguments.report:
      print(write_report(planned, folder, name, arguments.docs))
    else:
      reproduce(planned, folder, name, arguments.only)
  except (ConfigError, PretrainedError, tasks.TaskError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except loop.Interrupted as stopped:
    print('stopped; the same command goes on', file=sys.stderr)
    return 128 + stopped.signum
  except KeyboardInterrupt:
    print('interrupted; the same command goes on', file=sys.stderr)
    return 130
  return 0


if __name__ == '__main__':
  sys.exit(main())
