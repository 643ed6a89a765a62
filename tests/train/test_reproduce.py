"""The whole pipeline in miniature, through the real loop and the report."""

import dataclasses
import json
import os
import signal
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sr_optax
from train import arms, loop, policy, tasks
from train.config import Config, ConfigError
from train.reproduce import __main__ as command
from train.reproduce import claims, curves, plans
from train.reproduce.runs import run_all
from train.tasks import Task

pytestmark = pytest.mark.usefixtures('quick_compile', 'compile_once')


@dataclass(frozen=True)
class Even(Task):
  """Pays for one even digit, which an untrained model finds, too."""

  def accepted(self, question):
    return tuple('02468')


@pytest.fixture
def setting(make_folder, tmp_path, monkeypatch):
  task = tasks.load_task('addition', train_size=101, evaluation_size=53)
  parts = task.name, task.train, task.evaluation, task.best_constant
  monkeypatch.setattr(tasks, 'load_task', lambda name, **_: Even(*parts))
  base = Config(
    model=str(make_folder(layers=1)),
    task='addition',
    steps=4,
    prompts=5,
    group=7,
    max_new_tokens=3,
    lr=3e-3,
    eval_every=2,
    eval_questions=11,
    eval_samples=7,
    compute_dtype='float32',
    save_final=False,
  )
  return plans.Setting(tmp_path / 'results', base)


def test_a_miniature_runs_once_resumes_and_is_reported(
  setting, tmp_path, monkeypatch, capsys
):
  folder, docs = tmp_path / 'results', tmp_path / 'docs'
  planned = setting.pilots(1)
  planned += setting.runs(('fp16', 'bf16', 'bf16-sr'), range(2))
  planned += setting.runs(['bf16'], [0], [3.0])
  planned += setting.runs(
    ['fp16'],
    [0],
    variant=claims.UNSCALED,
    compute_dtype='float16',
    loss_scaler='off',
    reward_scale=1e9,  # overflows
  )
  assert [run.name for run in planned[:3]] == [
    'model-addition-fp32-x1-s1000',
    'model-addition-fp16-x1-s0',
    'model-addition-bf16-x1-s0',
  ]

  # Told to stop in the third step of the first run, it goes on later.
  step = loop.Trainer.step

  def stop(self, i):
    if i == 2:
      os.kill(os.getpid(), signal.SIGTERM)
    return step(self, i)

  monkeypatch.setattr(loop.Trainer, 'step', stop)
  with pytest.raises(loop.Interrupted):
    command.reproduce(planned, folder, 'mini')
  assert not planned[0].done
  monkeypatch.setattr(loop.Trainer, 'step', step)
  only = 'model-addition-fp32*'
  assert command.reproduce(planned, folder, 'mini', only) == 1
  assert planned[0].done and not planned[1].done
  assert command.reproduce(planned, folder, 'mini') == len(planned) - 1
  assert all(run.done for run in planned)

  # A second call runs nothing.
  monkeypatch.setattr(loop, 'run', None)
  capsys.readouterr()
  assert command.reproduce(planned, folder, 'mini') == 0
  shown = capsys.readouterr().out
  assert '| (a) |' in shown and 'mini: model on addition' in shown
  kept = {'config.json', 'evaluation_before.json', 'metrics.jsonl'}
  kept |= {'completions.jsonl'}
  for run in planned:
    last = 'failed.json' if run.variant else 'summary.json'
    assert {p.name for p in run.config.out.iterdir()} == kept | {last}

  path = command.write_report(planned, folder, 'mini', docs)
  results = json.loads((docs / 'results' / 'mini.json').read_text())
  assert results['missing'] == [] and results['planned'] == len(planned)
  runs = [curves.Run.from_json(run) for run in results['runs']]
  assert [run.arm for run in runs] == [run.config.arm for run in planned]
  for run in runs[:-1]:
    assert run.curves['step'].tolist() == [0, 2, 4]
    assert run.curves['kl'][0] == 0 and (run.curves['kl'][1:] > 0).all()
    assert (run.curves['kl_step'][1:] > 0).all()
    assert (run.curves['changed'][1:] > 0).all()
    assert run.failed is None
  rounded = [run for run in runs[:-1] if run.arm != 'fp32']
  assert all((r.curves['least_changed'][1:] > 0).all() for r in rounded)
  assert runs[0].pilot and not any(run.pilot for run in runs[1:])
  assert 'loss' in runs[-1].failed and runs[-1].length == 4
  assert runs[7].multiple == 3.0
  assert runs[7].lr == pytest.approx(9e-3)
  # Arms of a seed start from the same policy.
  starts = {run.curves['reward'][0] for run in runs if run.arm != 'fp16'}
  assert len(starts) == 1
  text = path.read_text()
  for claim in ('a', 'b', 'c1', 'c2', 'd', 'e', 'f1', 'f2'):
    assert f'| ({claim}) |' in text
  assert (docs / 'results' / 'mini-speed.png').exists()
  assert str(tmp_path) not in text + json.dumps(results)

  # Other settings in the same folder are refused.
  config = dataclasses.replace(planned[1].config, prompts=6)
  with pytest.raises(ConfigError, match='prompts is 5, now 6'):
    run_all([planned[1]._replace(config=config)], folder)


def test_the_sets_hold_what_they_promise(tmp_path, monkeypatch):
  monkeypatch.setattr(plans, 'base_rate', lambda *_: 1e-6)
  sets = {name: plan(tmp_path) for name, plan in plans.PLANS.items()}
  for planned in sets.values():
    assert len({run.config.out for run in planned}) == len(planned)
    assert all(run.config.arm == 'fp32' for run in planned if _pilot(run))
  small = _main(sets['small'])
  every = 'fp32 fp16 bf16 bf16-sr bf16-sr-sticky bf16-pure bf16-sr-pure'
  wanted = {(arm, 1.0) for arm in every.split()}
  wanted |= {('bf16', m) for m in (1.5, 2.0, 3.0, 4.0, 6.0)}
  wanted |= {('fp32', 2.0), ('fp32', 4.0)}
  assert wanted <= set(small)
  assert all(small[key] == list(range(5)) for key in wanted)
  others = {(r.config.model, r.config.task) for r in sets['small']}
  assert others == {
    ('tiny', 'addition'), ('tiny', 'arithmetic'), ('tiny-wide', 'addition')
  }  # fmt: skip
  rates = {m for arm, m in small if arm == 'fp16'}
  assert len(rates) >= 5 and max(rates) / min(rates) >= 100
  pilots = {r.multiple for r in sets['small'] if _pilot(r)}
  assert rates <= pilots
  quick = _main(sets['quick'])
  assert set(quick) == {
    ('fp16', 1.0), ('bf16', 1.0), ('bf16-sr', 1.0), ('bf16', 3.0)
  }  # fmt: skip
  real = _main(sets['real'])
  assert {('bf16', m) for m in (1.0, 2.0, 5.0, 10.0)} <= set(real)
  assert all(r.config.steps == 30 for r in sets['real'])
  base = {r.config.lr for r in sets['real'] if r.multiple == 1}
  assert base == {2e-6}
  # Without arm, rate and seed, all runs of a setting are one configuration.
  free = dict(arm='bf16', lr=1.0, seed=0, out=None)
  for planned in sets.values():
    settings = {}
    for run in planned:
      if not run.variant:
        shared = dataclasses.replace(run.config, **free)
        settings.setdefault((shared.model, shared.task), set()).add(shared)
    assert all(len(configs) == 1 for configs in settings.values())


def _pilot(run):
  return run.config.seed >= 1000


def _main(planned):
  """Seeds by arm and multiple of the first setting, without variants."""
  first, found = planned[0].config, {}
  for run in planned:
    same = (run.config.model, run.config.task) == (first.model, first.task)
    if same and not run.variant and not _pilot(run):
      key = run.config.arm, run.multiple
      found.setdefault(key, []).append(run.config.seed)
  return {key: sorted(seeds) for key, seeds in found.items()}


def test_the_base_rate_is_where_the_forecast_moves_two_percent(make_folder):
  task = tasks.load_task('addition', train_size=7, evaluation_size=5)
  model = str(make_folder())
  rate = plans.base_rate(model, task)
  assert rate == float(f'{rate:.1e}')
  params = policy.load_policy(model, task).params

  def moved(rate):
    forecast = sr_optax.forecast_sticking(params, rate, betas=(0.9, 0.95))
    return forecast.total.bfloat16.steady

  assert moved(0.89 * rate) < 0.02 <= moved(rate)


@pytest.mark.parametrize('name', arms.ARMS)
def test_the_rate_is_data_of_one_program_and_changes_no_bit(name):
  arm, key = arms.ARMS[name], jax.random.key(3)
  rng = np.random.default_rng(0)
  weights = {'w': jnp.asarray(rng.normal(size=(31, 7)) * 0.02, jnp.bfloat16)}
  weights = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
  grads = {'w': jnp.asarray(rng.normal(size=(31, 7)), jnp.float32)}

  def lowered(rate):
    tx = arms.optimizer(arm, rate, key)
    params, state = arms.start(arm, tx, weights)

    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    return jax.jit(step).lower(params, state, grads), params, state

  program, params, state = lowered(2.3e-4)
  assert program.as_text() == lowered(1e-6)[0].as_text()
  got, _ = program.compile()(params, state, grads)
  # The first step of clipped Adam, its rate a constant of the program.
  links = [
    optax.clip_by_global_norm(1.0),
    optax.adamw(2.3e-4, b1=0.9, b2=0.95, weight_decay=0.0),
  ]
  last = {
    'stochastic': lambda: sr_optax.stochastic_rounding(
      key, shadow=arm.shadow, refresh_every=arm.refresh_every
    ),
    'nearest': lambda: sr_optax.nearest_rounding(
      dtype=arm.param_dtype, shadow=arm.shadow
    ),
  }
  if arm.rounding is None:
    tx = optax.chain(*links)
  else:
    tx = sr_optax.chain(*links, last[arm.rounding]())
  params, state = arms.start(arm, tx, weights)

  @jax.jit
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates)

  want = step(params, state, grads)
  assert want['w'].dtype == got['w'].dtype == arm.param_dtype
  assert np.asarray(want['w']).tobytes() == np.asarray(got['w']).tobytes()


def test_the_command_line_lists_and_refuses(
  setting, tmp_path, monkeypatch, capsys
):
  settings = (
    'jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs'
  )  # fmt: skip
  before = {name: getattr(jax.config, name) for name in settings}
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  plan = setting.runs(('fp16', 'bf16'), range(2))
  monkeypatch.setitem(plans.PLANS, 'quick', lambda folder: plan)

  def call(*flags):
    monkeypatch.setattr(sys, 'argv', ['reproduce', '--quick', *flags])
    code = command.main()
    return code, *capsys.readouterr()

  try:
    code, out, _ = call('--list', '--only', '*-s1')
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
      ['model-addition-fp16-x1-s1', 'to', 'do'],
      ['model-addition-bf16-x1-s1', 'to', 'do'],
    ]
    code, _, err = call('--only', 'nothing', '--results', str(tmp_path / 'r'))
    assert code == 2 and '--list names them' in err
    # A report needs no run: it says that nothing was run.
    none = '--results', str(tmp_path / 'none'), '--docs', str(tmp_path / 'd')
    code, out, _ = call('--report', *none)
    assert code == 0 and out.strip() == str(tmp_path / 'd' / 'results.md')
    assert '**small**: NOT RUN' in (tmp_path / 'd' / 'results.md').read_text()
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
