"""`python -m sr_optax PATH --lr 1e-6`: forecasts sticking of a checkpoint."""

import argparse
import pathlib
import sys
from collections.abc import Iterator

from sr_optax import forecast

_FLOATS = ('BF16', 'F16', 'F32', 'F64')  # names of safetensors
_EPILOG = """\
movable: share of the weights that the largest Adam step, lr * sqrt((1 - b1) /
(1 - b2)), can move visibly under round-to-nearest; steady: share that one step
of a steady gradient, lr, moves; steps to half: such steps in one direction
until half of the weights have moved. Leaves that stick most come first;
tensors that are not BF16, F16, F32 or F64 are left out.
"""


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  options = _parser().parse_args(arguments)
  try:
    result = forecast.forecast_leaves(
      _tensors(options.path),
      options.lr,
      betas=tuple(options.betas),
      eps=options.eps,
      gradient_rms=options.gradient_rms,
    )
  except _InputError as error:
    return _fail(str(error))
  except TypeError:
    return _fail(f'{options.path}: expected float tensors, found none')
  except ValueError as error:
    return _fail(str(error))
  print(
    f'Adam at lr {options.lr:g}: steady step {result.steady_step:.3g}, '
    f'largest step {result.largest_step:.3g}; round-to-nearest'
  )
  for line in forecast.format_table(result, options.top):
    print(line)
  return 0


class _InputError(Exception):
  """A file that cannot be read; the message is for the user."""


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m sr_optax',
    description='Forecasts which weights of a checkpoint Adam can move '
    'visibly in BF16 and in FP16.',
    epilog=_EPILOG,
  )
  parser.add_argument(
    'path', type=pathlib.Path, help='a .safetensors file, or a folder of them'
  )
  parser.add_argument('--lr', type=float, required=True, help='learning rate')
  parser.add_argument(
    '--betas',
    type=float,
    nargs=2,
    default=(0.9, 0.999),
    metavar=('B1', 'B2'),
    help='decay rates of Adam (default: 0.9 0.999)',
  )
  parser.add_argument(
    '--eps', type=float, default=1e-8, help='epsilon of Adam (default: 1e-8)'
  )
  parser.add_argument(
    '--gradient-rms',
    type=float,
    default=1.0,
    help='typical size of a gradient entry, beside eps (default: 1)',
  )
  parser.add_argument(
    '--top', type=_natural, metavar='N', help='show N leaves only'
  )
  return parser


def _natural(text: str) -> int:
  value = int(text)
  if value < 0:
    raise argparse.ArgumentTypeError(f'expected 0 or more, got {value}')
  return value


def _tensors(path: pathlib.Path) -> Iterator[tuple[str, object]]:
  """Float tensors of a file or folder, one at a time."""
  try:
    import safetensors
  except ImportError:
    raise _InputError(
      "the safetensors package is missing: pip install 'sr-optax[forecast]'"
    ) from None
  if path.is_dir():
    files = sorted(path.glob('*.safetensors'))
    if not files:
      raise _InputError(f'{path}: no .safetensors file in this folder')
  elif path.exists():
    files = [path]
  else:
    raise _InputError(f'{path}: no such file or folder')
  for file in files:
    try:
      with safetensors.safe_open(file, framework='numpy') as tensors:
        for name in tensors.keys():
          if tensors.get_slice(name).get_dtype() in _FLOATS:
            yield name, tensors.get_tensor(name)
    except (OSError, safetensors.SafetensorError) as error:
      raise _InputError(f'{file}: cannot be read: {error}') from None


def _fail(message: str) -> int:
  print(f'sr_optax: error: {message}', file=sys.stderr)
  return 2


if __name__ == '__main__':
  sys.exit(main())
