"""What a run leaves behind: its configuration, metrics and summary."""

import dataclasses
import importlib.metadata
import json
import math
import platform
from pathlib import Path
from typing import Any

import jax

from train.config import Config, ConfigError

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'reasoning-gym')


class RunFolder:
  """A new folder with `config.json`, `metrics.jsonl` and `summary.json`."""

  def __init__(self, path: Path):
    """Remembers the path; `create` makes it.

    Raises:
      ConfigError: if something is there already.
    """
    self.path = path
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
      raise ConfigError(
        f'the run folder {path} exists and is not empty; choose another with '
        '--out'
      )

  def create(self, config: Config, **resolved: Any) -> None:
    """Makes the folder and writes the resolved configuration into it."""
    self.path.mkdir(parents=True, exist_ok=True)
    versions = {'python': platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    device = jax.devices()[0]
    content = dataclasses.asdict(config) | resolved
    content |= {'out': str(self.path), 'versions': versions}
    content |= {'device': f'{jax.device_count()} x {device.device_kind}'}
    self._write_json('config.json', content)

  def append_metrics(self, record: dict[str, Any]) -> None:
    """Adds one line to `metrics.jsonl`, at once on disk."""
    with open(self.path / 'metrics.jsonl', 'a') as file:
      file.write(json.dumps(_strict(record), allow_nan=False) + '\n')

  def write_summary(self, summary: dict[str, Any]) -> None:
    """Writes `summary.json`."""
    self._write_json('summary.json', _strict(summary))

  def _write_json(self, name: str, content: dict[str, Any]) -> None:
    (self.path / name).write_text(json.dumps(content, indent=2) + '\n')


def _strict(record: dict[str, Any]) -> dict[str, Any]:
  """JSON knows no NaN: null where a number does not exist (a share of none)."""
  return {
    name: None if isinstance(x, float) and not math.isfinite(x) else x
    for name, x in record.items()
  }


def read_metrics(path: Path) -> list[dict[str, Any]]:
  """Reads the steps of a run: one dict a line of its `metrics.jsonl`."""
  lines = (path / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]
