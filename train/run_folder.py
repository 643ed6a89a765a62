"""What a run leaves behind: its configuration, metrics and summary."""

import dataclasses
import importlib.metadata
import json
import math
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import jax

from train.config import Config, ConfigError

_METRICS, _COMPLETIONS = 'metrics.jsonl', 'completions.jsonl'
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'reasoning-gym')


class RunFolder:
  """A folder with `config.json`, `summary.json` and a few `.jsonl`."""

  def __init__(self, path: Path, resume: bool = False, write: bool = True):
    """Remembers the path; `create` makes it.

    Args:
      path: of the folder.
      resume: whether there is one already.
      write: False on all but one of several processes: nothing is written.

    Raises:
      ConfigError: if something is there already, or, to resume, no run.
    """
    self.path = path
    self._write = write
    if resume:
      self._saved = read_config(path)
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
      raise ConfigError(
        f'the run folder {path} exists and is not empty; choose another with '
        '--out, or go on with --resume'
      )

  def warn_of_other_versions(self) -> None:
    """Warns if the run that is resumed was started by other software."""
    saved, now = self._saved['versions'], _versions()
    changed = [
      f'{name} {saved.get(name)} -> {version}'
      for name, version in now.items()
      if saved.get(name) != version
    ]
    if changed:
      warnings.warn(
        'resumed under other versions, so bits may differ: '
        + ', '.join(changed),
        stacklevel=2,
      )

  def create(self, config: Config, **resolved: Any) -> None:
    """Makes the folder and writes the resolved configuration into it."""
    if self._write:
      self.path.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0]
    content = settings(config) | resolved
    content |= {'out': str(self.path), 'versions': _versions()}
    content |= {'device': f'{jax.device_count()} x {device.device_kind}'}
    self.write_json('config.json', content)

  def wait(self, seconds: float) -> None:
    """Waits until this process sees what the writing one has made.

    Raises:
      ConfigError: if it does not; file systems may take a while.
    """
    until = time.monotonic() + seconds
    while not (self.path / 'config.json').is_file():
      if time.monotonic() > until:
        raise ConfigError(
          f'the run folder {self.path} is not on a file system that all '
          'processes see'
        )
      time.sleep(1)

  def metrics(self) -> list[dict[str, Any]]:
    """The steps written so far."""
    return read_metrics(self.path)

  def keep_metrics(self, steps: int) -> None:
    """Drops what was written after `steps`, to be written again."""
    for name in (_METRICS, _COMPLETIONS):
      file = self.path / name
      kept = [r for r in _read_lines(file) if r['step'] <= steps]
      if name == _METRICS and len(kept) < steps:
        raise ConfigError(f'{file} lacks steps before {steps}')
      if self._write:
        _replace(file, ''.join(_line(record) for record in kept))

  def append_metrics(self, record: dict[str, Any]) -> None:
    """Adds one line to `metrics.jsonl`, at once on disk."""
    self._append(_METRICS, [record])

  def append_completions(self, records: list[dict[str, Any]]) -> None:
    """Adds lines to `completions.jsonl`: what the policy wrote."""
    self._append(_COMPLETIONS, records)

  def _append(self, name: str, records: list[dict[str, Any]]) -> None:
    if self._write and records:
      with open(self.path / name, 'a') as file:
        file.write(''.join(map(_line, records)))

  def write_summary(self, summary: dict[str, Any]) -> None:
    """Writes `summary.json`."""
    self.write_json('summary.json', _strict(summary))

  def write_json(self, name: str, content: Any) -> None:
    """Writes a file, whole or not at all."""
    if self._write:
      _replace(self.path / name, json.dumps(content, indent=2) + '\n')


def settings(config: Config) -> dict[str, Any]:
  """A configuration as it reads in `config.json`."""
  return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _replace(file: Path, text: str) -> None:
  """Writes a file so that a killed run leaves the old one or the new one."""
  new = file.with_suffix('.new')
  new.write_text(text)
  new.replace(file)


def _strict(record: dict[str, Any]) -> dict[str, Any]:
  """JSON knows no NaN: null where a number does not exist (a share of none)."""
  return {
    name: None if isinstance(x, float) and not math.isfinite(x) else x
    for name, x in record.items()
  }


def _line(record: dict[str, Any]) -> str:
  return json.dumps(_strict(record), allow_nan=False) + '\n'


def _versions() -> dict[str, str]:
  versions = {'python': platform.python_version()}
  return versions | {
    name: importlib.metadata.version(name) for name in _PACKAGES
  }


def read_config(path: Path) -> dict[str, Any]:
  """Reads the resolved configuration of a run.

  Raises:
    ConfigError: if there is none.
  """
  try:
    config = json.loads((path / 'config.json').read_text())
  except (OSError, ValueError) as error:
    raise ConfigError(f'{path} is no run folder: {error}') from error
  if not isinstance(config, dict) or not {'arm', 'versions'} <= config.keys():
    raise ConfigError(f'{path} is no run folder: its config.json is not a run')
  return config


def read_metrics(path: Path) -> list[dict[str, Any]]:
  """Reads the steps of a run: one dict a line of its `metrics.jsonl`.

  A last line that a killed run did not finish is left out.

  Raises:
    ConfigError: if another line is none.
  """
  return _read_lines(path / _METRICS)


def _read_lines(file: Path) -> list[dict[str, Any]]:
  if not file.exists():
    return []
  whole, _, _ = file.read_text().rpartition('\n')
  try:
    records = [json.loads(line) for line in whole.splitlines()]
  except ValueError as error:
    raise ConfigError(f'{file} is corrupt: {error}') from error
  for number, record in enumerate(records, 1):
    if not isinstance(record, dict) or type(record.get('step')) is not int:
      raise ConfigError(f'{file} is corrupt: line {number} has no step')
  return records
