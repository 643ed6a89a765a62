"""The runs of the experiment: arms, rates and seeds of every set."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sr_optax
from train import policy, tasks
from train.config import Config
from train.reproduce import claims

CORE = ('fp16', 'bf16', 'bf16-sr', 'bf16-sr-sticky')
FIRST_PILOT = 1000  # seeds from here on set targets and are judged nowhere
# RN shall move this share of the weights in one steady step from their grid.
# It grows in jumps, with the exponents of the weights: 2 % is the last jump
# within 0.5-3 %, and leaves BF16 a chance to move at all in a short run.
MOVED = 0.02
# (d): rewards, and with them gradients, as small as in a batch of a million
# tokens, where float16 underflows. Adam itself does not see the scale.
SMALL_REWARD = 2.0**-10
MAP = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)  # multiples of the learning rate


class Planned(NamedTuple):
  """A run to be done, and how the claims call it."""

  name: str
  config: Config  # its `out` is the run folder
  multiple: float
  variant: str = ''

  @property
  def done(self) -> bool:
    """Whether it ran to its end, or as far as it can."""
    return any((self.config.out / name).exists() for name in _LAST_FILES)


_LAST_FILES = ('summary.json', 'failed.json')


class Setting:
  """A model on a task, and what all its runs share."""

  def __init__(self, folder: Path, base: Config):
    """Plans into a folder.

    Args:
      folder: of the results.
      base: model, task, learning rate and cadences of every run.
    """
    self._folder, self._base = folder, base

  def runs(
    self,
    arms: Sequence[str],
    seeds: Sequence[int],
    multiples: Sequence[float] = (1.0,),
    variant: str = '',
    **changes: Any,
  ) -> list[Planned]:
    """Arms times multiples times seeds, a seed after the other."""
    base, planned = self._base, []
    for seed in seeds:
      for multiple in multiples:
        for arm in arms:
          words = [Path(base.model).name, base.task, arm, f'x{multiple:.3g}']
          words += [variant.replace(', ', '-').replace(' ', '-')] * bool(
            variant
          )
          name = '-'.join([*words, f's{seed}'])
          config = dataclasses.replace(
            base,
            arm=arm,
            lr=float(f'{base.lr * multiple:.4g}'),
            seed=seed,
            out=self._folder / 'runs' / name,
            **changes,
          )
          planned.append(Planned(name, config, multiple, variant))
    return planned

  def pilots(self, count: int, multiple: float = 1.0) -> list[Planned]:
    """The fp32 runs that fix the targets."""
    seeds = range(FIRST_PILOT, FIRST_PILOT + count)
    return self.runs(['fp32'], seeds, [multiple])


def base_rate(model: str, task: tasks.Task, share: float = MOVED) -> float:
  """The rate at which a steady Adam step moves a share of BF16 weights.

  By bisection of `sr_optax.forecast_sticking`, before any training; two
  digits, rounded up.
  """
  params = policy.load_policy(model, task).params
  low, high = 1e-9, 1e-1
  while high / low > 1.001:
    middle = math.sqrt(low * high)
    forecast = sr_optax.forecast_sticking(params, middle, betas=(0.9, 0.95))
    if forecast.total.bfloat16.steady >= share:
      high = middle
    else:
      low = middle
  digit = 10.0 ** (math.floor(math.log10(high)) - 1)
  return float(f'{math.ceil(high / digit) * digit:.2g}')


def _small(folder: Path, model: str, task: str, steps: int = 64) -> Setting:
  rate = base_rate(model, tasks.load_task(task))
  base = Config(
    model=model,
    task=task,
    steps=steps,
    prompts=32,
    group=8,
    max_new_tokens=5,
    lr=rate,
    eval_every=2,
    eval_questions=96,
    eval_samples=8,
    compute_dtype='float32',
    save_final=False,
  )
  return Setting(folder, base)


def plan_small(folder: Path) -> list[Planned]:
  """The whole experiment on character models."""
  main, seeds = _small(folder, 'tiny', 'addition'), range(5)
  every = ('fp32', *CORE, 'bf16-pure', 'bf16-sr-pure')
  planned = main.pilots(3)
  for seed in seeds:  # a seed after the other: what is done can be compared
    planned += main.runs(every, [seed])
    planned += main.runs(['bf16'], [seed], (1.5, 2.0, 3.0, 4.0, 6.0))
    planned += main.runs(['fp32'], [seed], (2.0, 4.0))
  planned += _scaling(main, range(3))
  for model, task in (('tiny', 'arithmetic'), ('tiny-wide', 'addition')):
    other = _small(folder, model, task)
    planned += other.pilots(2) + other.runs(CORE, range(3))
  for multiple in MAP:
    planned += main.pilots(2, multiple)
    planned += main.runs(('fp16', 'bf16', 'bf16-sr'), range(2), [multiple])
  planned += main.runs(('fp16', 'bf16-sr'), range(5), MAP[:1])  # (f2)
  return _distinct(planned)


def _scaling(setting: Setting, seeds: Sequence[int]) -> list[Planned]:
  """(d): small gradients in 16 bits, with and without the scaler."""
  planned = []
  for arm, variant, dtype, scaler in (
    ('fp16', claims.SCALED, 'float16', 'auto'),
    ('fp16', claims.UNSCALED, 'float16', 'off'),
    ('bf16-sr', claims.BFLOAT16, 'bfloat16', 'off'),
  ):
    planned += setting.runs(
      [arm],
      seeds,
      variant=variant,
      compute_dtype=dtype,
      loss_scaler=scaler,
      reward_scale=SMALL_REWARD,
    )
  return planned


def plan_quick(folder: Path) -> list[Planned]:
  """Four arms, three seeds."""
  setting = _small(folder, 'tiny', 'addition')
  planned = setting.pilots(2)
  for seed in range(3):
    planned += setting.runs(('fp16', 'bf16', 'bf16-sr'), [seed])
    planned += setting.runs(['bf16'], [seed], [3.0])
  return planned


def plan_real(folder: Path) -> list[Planned]:
  """SmolLM2-135M on two tasks."""
  planned = []
  for task, arms, multiples in (
    ('arithmetic', ('fp32', *CORE), (2.0, 5.0, 10.0)),
    ('simple_equations', CORE, ()),
  ):
    setting = Setting(
      folder,
      Config(
        model='smollm2',
        task=task,
        steps=30,
        lr=2e-6,
        eval_every=5,
        eval_questions=24,
        eval_samples=8,
        compute_dtype='float32',
        save_final=False,
      ),
    )
    planned += setting.pilots(2)
    for seed in range(3):
      planned += setting.runs(arms, [seed])
      planned += setting.runs(['bf16'], [seed], multiples)
  return planned


PLANS: dict[str, Callable[[Path], list[Planned]]] = {
  'small': plan_small,
  'real': plan_real,
  'quick': plan_quick,
}


def _distinct(planned: Sequence[Planned]) -> list[Planned]:
  return list({run.name: run for run in planned}.values())
