"""`python -m train.reproduce`: the claim, run arm by arm and judged."""

import dataclasses
import fnmatch
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

# As in `train.__main__`: on a GPU, bits repeat with deterministic kernels only.
_FLAG = ' --xla_gpu_deterministic_ops=true'
if _FLAG not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + _FLAG

import jax  # noqa: E402 - it reads XLA_FLAGS when it is imported
import tyro  # noqa: E402

from train import loop, tasks, warmup  # noqa: E402
from train.config import ConfigError  # noqa: E402
from train.pretrained import PretrainedError  # noqa: E402
from train.reproduce import report  # noqa: E402
from train.reproduce.plans import PLANS, Planned  # noqa: E402
from train.reproduce.runs import collect, run_all  # noqa: E402


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
