"""Eight CPU devices, strict JAX settings, warnings as errors."""

import pathlib

import jax
import pytest

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_debug_key_reuse', True)

WARNINGS = (
  'error',
  # Orbax and Flax warn about their own use of JAX and of each other.
  'ignore::DeprecationWarning:(orbax|flax|etils|tensorstore).*',
)


def pytest_collection_modifyitems(items):
  here = pathlib.Path(__file__).parent
  for item in items:
    if here in item.path.parents:
      item.add_marker(pytest.mark.filterwarnings(*WARNINGS), append=False)
