"""The configuration of a run: every flag, its default and its unit."""

import dataclasses
from pathlib import Path

from train import arms, tasks

COMPUTE_DTYPES = ('auto', 'float32', 'bfloat16', 'float16')
LOSS_SCALERS = ('auto', 'off')


class ConfigError(ValueError):
  """A setting that cannot be run; its message is for the user."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Post-trains a policy with verifiable rewards."""

  model: str = 'smollm2'
  """smollm2; tiny or tiny-wide (small character models, warmed up first); or
  the path of a Hugging Face directory."""
  task: str = 'arithmetic'
  """One of: arithmetic, gcd, products, basic_arithmetic, simple_equations,
  chain_sum, addition."""
  arm: str = 'bf16-sr'
  """Precision of the weights; one of: bf16-sr, bf16-sr-sticky, bf16-sr-pure,
  bf16, bf16-pure, fp16, fp32 (pure: no FP32 shadow)."""
  steps: int = 30
  """Optimizer steps."""
  prompts: int = 8
  """Prompts per step."""
  group: int = 8
  """Completions per prompt."""
  max_new_tokens: int = 8
  """Longest completion in tokens, its terminator included."""
  temperature: float = 1.0
  """Of sampling, and of the log-probabilities trained on."""
  lr: float = 2e-6
  """Learning rate of AdamW, constant."""
  seed: int = 0
  """Of prompts, samples and rounding."""
  out: Path | None = None
  """Run folder, new or empty; default: runs/DATE-MODEL-TASK-ARM."""
  compute_dtype: str = 'auto'
  """Of activations and gradients: float32, bfloat16, float16, or auto (the
  arm's; on a CPU float32, because BF16 and FP16 products are slow there)."""
  loss_scaler: str = 'auto'
  """auto (where the arm's gradients are float16) or off."""
  reward_scale: float = 1.0
  """What a right answer earns as the gradient sees it. Adam does not care;
  float16 gradients underflow when it is small, as in very large batches."""
  eval_every: int = 0
  """Steps between evaluations on held-out questions; 0: before and after."""
  eval_questions: int = 120
  """Held-out questions per evaluation."""
  eval_samples: int = 0
  """Completions per held-out question for the sampled reward, pass@k, greedy
  accuracy and the KL divergence on held-out prompts; 0: expected reward only,
  which is exact and quick."""
  kl_every: int = 1
  """Steps between measurements of the KL divergence from the reference; 0
  keeps no reference."""
  kl_penalty: float = 0.0
  """Weight of the KL divergence in the loss; needs --kl-every 1."""
  remat: bool = True
  """Recompute layers in the backward pass: less memory, more time."""
  checkpoint_every: int = 0
  """Steps between checkpoints; 0: at the end and when told to stop (SIGTERM,
  SIGINT)."""
  keep: int = 2
  """Checkpoints kept."""
  save_final: bool = True
  """Save checkpoint, weights and picture at the end; off: metrics only (a run
  told to stop still saves its checkpoint)."""
  resume: bool = False
  """Continue the run in --out from its last checkpoint. Flags that are not
  given keep the value they had."""

  def __post_init__(self):  # noqa: D105
    for name, known in (('task', tasks.TASKS), ('arm', arms.ARMS)):
      value = getattr(self, name)
      if value not in known:
        raise ConfigError(
          f'unknown {name} {value!r}; there are: {", ".join(known)}'
        )
    if self.compute_dtype not in COMPUTE_DTYPES:
      raise ConfigError(
        f'unknown compute dtype {self.compute_dtype!r}; there are: '
        + ', '.join(COMPUTE_DTYPES)
      )
    if self.loss_scaler not in LOSS_SCALERS:
      raise ConfigError(
        f'unknown loss scaler {self.loss_scaler!r}; there are: '
        + ', '.join(LOSS_SCALERS)
      )
    if self.group < 2:
      raise ConfigError(
        f'group: expected at least 2 completions per prompt, got {self.group} '
        '(the advantage is the difference from the group mean)'
      )
    for name in ('steps', 'prompts', 'max_new_tokens', 'keep'):
      if getattr(self, name) < 1:
        raise ConfigError(f'{name}: expected >= 1, got {getattr(self, name)}')
    if self.eval_questions < 2:
      raise ConfigError(
        f'eval_questions: expected >= 2 (a standard error is given), got '
        f'{self.eval_questions}'
      )
    for name in (
      'seed',
      'eval_every',
      'eval_samples',
      'kl_every',
      'checkpoint_every',
    ):
      if getattr(self, name) < 0:
        raise ConfigError(f'{name}: expected >= 0, got {getattr(self, name)}')
    for name in ('lr', 'temperature', 'reward_scale'):
      value = getattr(self, name)
      if not 0 < value < float('inf'):
        raise ConfigError(f'{name}: expected a positive number, got {value}')
    if not 0 <= self.kl_penalty < float('inf'):
      raise ConfigError(f'kl_penalty: expected >= 0, got {self.kl_penalty}')
    if self.kl_penalty and self.kl_every != 1:
      raise ConfigError(
        f'kl_penalty needs kl_every=1 (a reference at every step), got '
        f'kl_every={self.kl_every}'
      )
    if self.resume and self.out is None:
      raise ConfigError('resume: name the run folder with --out')
    if self.eval_samples % self.group:
      raise ConfigError(
        f'eval_samples: expected a multiple of group, {self.group} (they share '
        f'one compiled rollout), got {self.eval_samples}'
      )
