"""The configuration of a run: every flag, its default and its unit."""

import dataclasses
from pathlib import Path

from train import arms, tasks


class ConfigError(ValueError):
  """A setting that cannot be run; its message is for the user."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Post-trains a policy with verifiable rewards."""

  model: str = 'smollm2'
  """smollm2, tiny (a small character model, warmed up first), or the path of a
  Hugging Face directory."""
  task: str = 'arithmetic'
  """One of: arithmetic, gcd, products, basic_arithmetic, simple_equations,
  chain_sum, addition."""
  arm: str = 'bf16-sr'
  """Precision of the weights; one of: bf16-sr, bf16, fp32."""
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
  """Of activations and gradients: float32, bfloat16, or auto (float32 on a
  CPU, where bfloat16 is emulated and slow, bfloat16 elsewhere)."""
  eval_every: int = 0
  """Steps between evaluations on held-out questions; 0: before and after."""
  eval_questions: int = 120
  """Held-out questions per evaluation."""
  kl_every: int = 1
  """Steps between measurements of the KL divergence from the reference; 0
  keeps no reference."""

  def __post_init__(self):  # noqa: D105
    for name, known in (('task', tasks.TASKS), ('arm', arms.ARMS)):
      value = getattr(self, name)
      if value not in known:
        raise ConfigError(
          f'unknown {name} {value!r}; there are: {", ".join(known)}'
        )
    if self.compute_dtype not in ('auto', 'float32', 'bfloat16'):
      raise ConfigError(
        f'unknown compute dtype {self.compute_dtype!r}; '
        'there are: auto, float32, bfloat16'
      )
    if self.group < 2:
      raise ConfigError(
        f'group: expected at least 2 completions per prompt, got {self.group} '
        '(the advantage is the difference from the group mean)'
      )
    for name in ('steps', 'prompts', 'max_new_tokens', 'eval_questions'):
      if getattr(self, name) < 1:
        raise ConfigError(f'{name}: expected >= 1, got {getattr(self, name)}')
    for name in ('seed', 'eval_every', 'kl_every'):
      if getattr(self, name) < 0:
        raise ConfigError(f'{name}: expected >= 0, got {getattr(self, name)}')
    for name in ('lr', 'temperature'):
      value = getattr(self, name)
      if not 0 < value < float('inf'):
        raise ConfigError(f'{name}: expected a positive number, got {value}')
