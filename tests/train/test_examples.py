"""The recipes for clusters, as far as they can be checked without one.

Their shell runs, with what starts the processes replaced by a note of what it
was given; the flags of `train` are then read as `python -m train` reads them.
"""

import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import pytest
import tyro
import yaml

from train import __main__, sharding
from train.aot import __main__ as aot

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / 'examples'
DOCUMENT = (ROOT / 'docs' / 'scale.md').read_text()
JOB = 'gke_jobset.yaml'
SCRIPTS = sorted(path.name for path in EXAMPLES.glob('*.sh'))
RECIPES = [*SCRIPTS, JOB]
# What a recipe calls, and what is put in its place.
CALLED = ('gcloud', 'git', 'srun', 'python')
NOTE = r"""#!/bin/sh
printf '%s\0' {name} "$@" >>"$CALLS"
printf '\n\0' >>"$CALLS"
"""


@pytest.fixture
def called(tmp_path):
  """Runs the shell of a recipe: the command lines that it would have run."""
  stubs = tmp_path / 'bin'
  stubs.mkdir()
  for name in CALLED:
    stub = stubs / name
    stub.write_text(NOTE.format(name=name))
    stub.chmod(0o755)

  def run(recipe, out, **environment):
    calls = tmp_path / 'calls'
    calls.write_text('')
    command = ['bash', str(EXAMPLES / recipe)]
    if recipe == JOB:
      container = pod(job())['containers'][0]
      command = container['command'] + container['args']
    done = subprocess.run(
      command,
      cwd=tmp_path,
      env=os.environ
      | {'PATH': f'{stubs}:{os.environ["PATH"]}', 'CALLS': str(calls)}
      | dict(TPU='slice', ZONE='zone', MODEL='/shared/model', OUT=str(out))
      | environment,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = calls.read_text().split('\0\n\0')
    return [line.split('\0') for line in lines if line]

  return run


def job():
  return yaml.safe_load((EXAMPLES / JOB).read_text())


def pod(content):
  """The pods' specification."""
  (replicated,) = content['spec']['replicatedJobs']
  return replicated['template']['spec']['template']['spec']


def training(calls):
  """The flags behind `-m train` in the last call."""
  words = calls[-1]
  if words[0] == 'gcloud':  # a shell on every host takes them apart
    (line,) = [w for w in words if w.startswith('--command=')]
    words = shlex.split(line.removeprefix('--command='))
  start = words.index('-m')
  assert words[start + 1] == 'train'
  return words[start + 2 :]


def read(monkeypatch, flags):
  """The configuration, as `python -m train` reads it."""
  monkeypatch.setattr(sys, 'argv', ['train', *flags])
  return __main__.parse()


def devices(recipe):
  """How many devices a recipe asks for."""
  if recipe == JOB:
    topology = pod(job())['nodeSelector']['cloud.google.com/gke-tpu-topology']
    return math.prod(map(int, topology.split('x')))
  text = (EXAMPLES / recipe).read_text()
  if recipe == 'tpu_vm.sh':
    return int(re.search(r'--accelerator-type=v5litepod-(\d+)', text)[1])
  given = dict(re.findall(r'#SBATCH --([a-z-]+)=(\d+)', text))
  assert given['ntasks-per-node'] == given['gpus-per-node']
  return int(given['nodes']) * int(given['gpus-per-node'])


@pytest.mark.parametrize('recipe', RECIPES)
def test_train_reads_every_flag_of_a_recipe(
  called, tmp_path, monkeypatch, recipe
):
  out = tmp_path / 'shared run'  # a blank, where the recipe's shell quotes it
  if recipe == 'tpu_vm.sh':
    out = tmp_path / 'run'
  config = read(monkeypatch, training(called(recipe, out)))
  assert config.distributed and not config.resume
  assert (config.model, config.out) == ('/shared/model', out)
  assert config.coordinator_address is None  # JAX finds it
  sizes = sharding.parse_mesh(config.mesh)
  count = devices(recipe)
  known = math.prod(size for size in sizes.values() if size > 0)
  sizes = {k: count // known if n < 0 else n for k, n in sizes.items()}
  assert math.prod(sizes.values()) == count
  mesh = types.SimpleNamespace(shape=sizes)
  assert sharding.copies(config.micro_batch, config.group, mesh) == 1


@pytest.mark.parametrize('recipe', RECIPES)
def test_a_recipe_goes_on_where_a_run_was_begun(
  called, tmp_path, monkeypatch, recipe
):
  out = tmp_path / 'run'
  out.mkdir()
  (out / 'config.json').write_text(
    json.dumps({'arm': 'bf16', 'versions': {}, 'seed': 7})
  )
  again = {'RESUME': '--resume'} if recipe == 'tpu_vm.sh' else {}
  config = read(monkeypatch, training(called(recipe, out, **again)))
  assert config.resume and config.distributed
  assert (config.arm, config.seed) == ('bf16', 7)


@pytest.mark.parametrize('recipe', SCRIPTS)
def test_a_script_is_bash_and_says_what_it_lacks(recipe):
  path = str(EXAMPLES / recipe)
  assert not subprocess.run(['bash', '-n', path]).returncode
  named = {k: v for k, v in os.environ.items() if k not in ('MODEL', 'OUT')}
  done = subprocess.run(
    ['bash', path],
    env=named | {'TPU': 'slice', 'ZONE': 'zone'},
    capture_output=True,
    text=True,
  )
  assert done.returncode and 'MODEL: path of the model' in done.stderr


def test_the_pods_of_a_job_are_one_slice():
  content = job()
  assert content['apiVersion'] == 'jobset.x-k8s.io/v1alpha2'
  assert content['kind'] == 'JobSet'
  (replicated,) = content['spec']['replicatedJobs']
  hosts = replicated['template']['spec']
  (container,) = pod(content)['containers']
  chips = container['resources']['limits']['google.com/tpu']
  assert replicated['replicas'] == 1
  assert hosts['completions'] == hosts['parallelism']
  assert hosts['parallelism'] * chips == devices(JOB)
  assert hosts['backoffLimit'] == 0  # else JobSet would not see a failure
  mounted = {volume['name'] for volume in container['volumeMounts']}
  assert mounted == {volume['name'] for volume in pod(content)['volumes']}


def commands(module):
  """The command lines of a module in the document's shell blocks."""
  blocks = re.findall(r'```sh\n(.*?)```', DOCUMENT, re.DOTALL)
  lines = '\n'.join(blocks).replace('\\\n', ' ').splitlines()
  start = f'python -m {module} '
  return [
    shlex.split(line.removeprefix(start), comments=True)
    for line in lines
    if line.startswith(start)
  ]


def test_the_document_names_flags_that_exist(monkeypatch):
  assert len(commands('train')) >= 2 and commands('train.aot')
  for flags in commands('train'):
    assert read(monkeypatch, flags).distributed
  for flags in commands('train.aot'):
    tyro.cli(aot.Check, args=flags).run_config()


def test_what_the_document_and_the_recipes_link_to_is_there():
  for target in re.findall(r'\]\(([^)#]+)\)', DOCUMENT):
    assert '://' in target or (ROOT / 'docs' / target).exists(), target
  used = set(re.findall(r'\]\[(\w+)\]', DOCUMENT))
  assert used == set(re.findall(r'^\[(\w+)\]: ', DOCUMENT, re.MULTILINE))
  assert all(f'examples/{recipe}' in DOCUMENT for recipe in RECIPES)
