"""`python -m train`: post-trains a policy with verifiable rewards."""

import sys

import tyro

from train import loop
from train.config import Config, ConfigError
from train.pretrained import PretrainedError
from train.tasks import TaskError


def main() -> int:
  """Parses the command line and runs; 2 for what the user can mend."""
  try:
    loop.run(tyro.cli(Config, prog='python -m train'))
  except (ConfigError, PretrainedError, TaskError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except FloatingPointError as error:
    print(f'error: training diverged at {error}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
