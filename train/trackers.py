"""Metrics shown elsewhere as well: TensorBoard, W&B, Trackio.

`metrics.jsonl` is the record; these follow it. None is a dependency.
"""

import importlib.util
import math
from typing import Any

from train.config import Config, ConfigError
from train.run_folder import RunFolder, read_config

_PACKAGES = {
  'tensorboard': 'tensorboardX',
  'wandb': 'wandb',
  'trackio': 'trackio',
}


def check(config: Config) -> None:
  """Raises `ConfigError` where the package of a tracker is not installed."""
  for name in _wanted(config):
    package = _PACKAGES[name]
    if importlib.util.find_spec(package) is None:
      raise ConfigError(
        f'{name}: {package} is not installed; run `pip install {package}`'
      )


def _wanted(config: Config) -> list[str]:
  trackers = ['tensorboard'] if config.tensorboard else []
  return trackers + [config.tracker] * (config.tracker != 'off')


class Trackers:
  """Writes records to what the flags ask for; closes when left."""

  def __init__(
    self, config: Config, folder: RunFolder, first: int, *, write: bool = True
  ):
    """Opens them.

    Args:
      config: of the run.
      folder: of the run; TensorBoard's files go to its `tensorboard`.
      first: steps done before; what TensorBoard has of later ones is hidden.
      write: False on all but one of several processes: nothing is opened.
    """
    self._writer = self._module = None
    if not write:
      return
    if config.tensorboard:
      import tensorboardX

      self._writer = tensorboardX.SummaryWriter(
        str(folder.path / 'tensorboard'), purge_step=first + 1
      )
    if config.tracker != 'off':
      self._module = importlib.import_module(_PACKAGES[config.tracker])
      options = {}
      known = folder.path / 'wandb_id'  # Trackio knows a run by its name
      if config.tracker == 'wandb' and known.exists():
        options['id'] = known.read_text()
      run = self._module.init(
        project='sr-optax',
        name=folder.path.name,
        config=read_config(folder.path),
        resume='allow',
        **options,
      )
      if config.tracker == 'wandb':
        known.write_text(run.id)

  def __enter__(self) -> 'Trackers':  # noqa: D105
    return self

  def __exit__(self, *exception) -> None:  # noqa: D105
    if self._writer is not None:
      self._writer.close()
    if self._module is not None:
      self._module.finish()

  def write(self, record: dict[str, Any]) -> None:
    """Writes the finite numbers of one step, by the names of the record."""
    step = record['step']
    values = {
      name: x
      for name, x in record.items()
      if name != 'step' and x is not None and math.isfinite(x)
    }
    if self._writer is not None:
      for name, x in values.items():
        self._writer.add_scalar(name, x, step)
      self._writer.flush()
    if self._module is not None:
      self._module.log(values, step=step)
