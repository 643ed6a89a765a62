import json
import pathlib
import sys
import types

import numpy as np
import pytest

from train import loop
from train.config import Config, ConfigError
from train.run_folder import RunFolder
from train.trackers import Trackers, check

pytest.importorskip('tensorboardX')


def events(folder):
  """Scalars by name and step, the last one written, as TensorBoard shows."""
  from tensorboardX.proto import event_pb2

  found = {}
  for file in sorted(pathlib.Path(folder).iterdir()):
    data = file.read_bytes()
    while data:  # length u64, its crc u32, the event, its crc u32
      size = int.from_bytes(data[:8], 'little')
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      data = data[16 + size :]
      for value in event.summary.value:
        found[value.tag, event.step] = value.simple_value
  return found


def test_tensorboard_gets_what_the_metrics_file_gets(runner, tmp_path):
  out = tmp_path / 'run'
  loop.run(runner.config(out=out, steps=2, tensorboard=True, save_final=False))
  got = events(out / 'tensorboard')
  for record in runner.read(out):
    step = record.pop('step')
    for name, x in record.items():
      if x is not None:
        assert got.pop((name, step)) == np.float32(x)
  assert not got


def folder(path):
  path.mkdir()
  run = RunFolder(path)
  run.create(Config())
  return run


def test_numbers_that_do_not_exist_are_left_out(tmp_path):
  run = folder(tmp_path / 'run')
  with Trackers(Config(tensorboard=True), run, 0) as trackers:
    trackers.write({'step': 3, 'a': 1.5, 'b': None, 'c': float('nan')})
  assert events(run.path / 'tensorboard') == {('a', 3): 1.5}


@pytest.mark.parametrize('name', ['wandb', 'trackio'])
def test_the_others_are_called_as_they_document_it(name, tmp_path, monkeypatch):
  calls = []
  module = types.ModuleType(name)

  def init(**kwargs):
    calls.append(kwargs)
    return types.SimpleNamespace(id='x7')

  module.init = init
  module.log = lambda values, step: calls.append((values, step))
  module.finish = lambda: calls.append('finished')
  monkeypatch.setitem(sys.modules, name, module)
  run = folder(tmp_path / 'run')
  with Trackers(Config(tracker=name), run, 0) as trackers:
    trackers.write({'step': 1, 'reward_mean': 0.25})
  assert calls[0]['name'] == 'run' and calls[0]['resume'] == 'allow'
  assert calls[0]['config'] == json.loads(
    (run.path / 'config.json').read_text()
  )
  assert calls[1:] == [({'reward_mean': 0.25}, 1), 'finished']
  with Trackers(Config(tracker=name), run, 1):  # resumed
    assert calls[3].get('id') == ('x7' if name == 'wandb' else None)
    assert calls[3] | {'id': None} == calls[0] | {'id': None}


@pytest.mark.parametrize(
  'flags, package',
  [
    (dict(tensorboard=True), 'tensorboardX'),
    (dict(tracker='wandb'), 'wandb'),
    (dict(tracker='trackio'), 'trackio'),
  ],
)
def test_a_missing_package_is_named_before_anything_is_written(
  flags, package, monkeypatch, tmp_path
):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ConfigError, match=f'pip install {package}'):
    check(Config(**flags))
  check(Config())
  with pytest.raises(ConfigError, match=f'pip install {package}'):
    loop.run(Config(out=tmp_path / 'run', **flags))
  assert not (tmp_path / 'run').exists()


def test_an_unknown_tracker_is_refused():
  with pytest.raises(ConfigError, match="unknown tracker 'mlflow'; .* off, wa"):
    Config(tracker='mlflow')
