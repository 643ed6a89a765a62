"""The examples run and show what they claim; so do the docstrings."""

import doctest
import importlib
import importlib.util
import pathlib
import pkgutil

import pytest

import sr_optax

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
MODULES = ['sr_optax'] + [
  f'sr_optax.{module.name}'
  for module in pkgutil.iter_modules(sr_optax.__path__)
  if module.name != '__main__'
]


def test_quickstart_stalls_to_nearest_and_converges_stochastically(
  tmp_path, capsys
):
  pytest.importorskip('matplotlib')
  path = EXAMPLES / 'quickstart.py'
  if not path.exists():
    pytest.skip('no checkout beside these tests')
  spec = importlib.util.spec_from_file_location('quickstart', path)
  quickstart = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(quickstart)
  picture = tmp_path / 'picture.png'
  losses = quickstart.main(['--steps', '40', '--out', str(picture)])
  assert picture.read_bytes().startswith(b'\x89PNG')
  assert len(capsys.readouterr().out.splitlines()) == 4
  fp32, stochastic, lagging, stalled = (
    float(curve[-1]) for curve in losses.values()
  )
  assert abs(stochastic - fp32) < 0.05
  assert max(stochastic, fp32) + 0.1 < lagging < stalled
  assert stalled > 0.9


@pytest.mark.parametrize('name', MODULES)
def test_examples_in_docstrings_run(name):
  result = doctest.testmod(importlib.import_module(name))
  assert result.failed == 0


def test_public_functions_have_examples():
  for name in (
    'chain',
    'forecast_sticking',
    'round_with_bits',
    'sticking_metrics',
    'stochastic_round',
    'stochastic_rounding',
  ):
    assert '>>>' in getattr(sr_optax, name).__doc__, name
