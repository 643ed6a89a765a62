"""`python -m train`: post-trains a policy with verifiable rewards."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

# Runs are reproducible to the bit; on a GPU that takes deterministic kernels.
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_gpu_deterministic_ops=true'
)

import tyro  # noqa: E402 - JAX reads XLA_FLAGS when it is imported

from train import loop, processes  # noqa: E402
from train.config import PROCESS_FLAGS, Config, ConfigError  # noqa: E402
from train.pretrained import PretrainedError  # noqa: E402
from train.run_folder import read_config  # noqa: E402
from train.sharding import MeshError  # noqa: E402
from train.tasks import TaskError  # noqa: E402


def parse() -> Config:
  """The configuration from the command line.

  Flags of a resumed run that are not given keep the value they had.
  """
  early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  early.add_argument('--resume', action='store_true')
  early.add_argument('--out', type=Path)
  known, _ = early.parse_known_args()
  default = Config()
  if known.resume and known.out:
    saved = read_config(known.out)
    names = {field.name for field in dataclasses.fields(Config)}
    names -= set(PROCESS_FLAGS)  # where a run goes on is not where it started
    values = {name: saved[name] for name in names & set(saved)}
    try:
      default = Config(**values | {'out': known.out, 'resume': True})
    except TypeError as error:
      raise ConfigError(
        f'{known.out}/config.json is damaged: {error}'
      ) from error
  return tyro.cli(Config, prog='python -m train', default=default)


def main() -> int:
  """Runs; 2 for what the user can mend, 128 + signal when told to stop."""
  try:
    config = parse()
    processes.initialize(config)
    loop.run(config)
  except (ConfigError, MeshError, PretrainedError, TaskError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except FloatingPointError as error:
    print(f'error: training diverged at {error}', file=sys.stderr)
    return 1
  except loop.Interrupted as stopped:
    print(stopped, file=sys.stderr)
    return 128 + stopped.signum
  except KeyboardInterrupt:
    print('interrupted; nothing was saved of this step', file=sys.stderr)
    return 130
  return 0


if __name__ == '__main__':
  sys.exit(processes.run(main))
