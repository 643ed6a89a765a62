"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import pkgutil
import sys

import pytest

import sr_optax

MODULES = [m.name for m in pkgutil.iter_modules(sr_optax.__path__)]


@pytest.mark.parametrize('name', [n for n in MODULES if n != '__main__'])
def test_the_examples_of_the_module_run(name):
  importlib.import_module(f'sr_optax.{name}')
  # Not by attribute: `sr_optax.chain` is the function of that name.
  failed, _ = doctest.testmod(sys.modules[f'sr_optax.{name}'])
  assert failed == 0


def test_every_public_name_is_documented():
  public = [n for n in vars(sr_optax) if not n.startswith('_')]
  for name in public:
    assert vars(sr_optax)[name].__doc__, name
