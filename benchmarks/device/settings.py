"""Sizes of the timings, for a CPU and for an accelerator."""

import dataclasses

from train.model import ModelConfig
from train.presets import PRESETS


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes of the timings."""

  parameters: int  # of the optimizer step
  steps: int  # optimizer steps in a row, timed together
  copied: int  # FP32 elements, to see what the memory can do
  rounds: int  # repeats of optimizer steps and copies
  repeats: int  # of rollouts and training steps
  # Seconds that a timing may take, compiling included: the optimizer's, the
  # model's. It does not start with less left of the budget.
  optimizer_seconds: float
  model_seconds: float
  prompts: int
  group: int  # completions per prompt
  prompt_tokens: int
  new_tokens: int
  micro_batches: int
  model: ModelConfig


SMALL = Setting(
  parameters=400_000,
  steps=2,
  copied=2**18,
  rounds=3,
  repeats=3,
  optimizer_seconds=0,
  model_seconds=0,
  prompts=2,
  group=4,
  prompt_tokens=8,
  new_tokens=6,
  micro_batches=2,
  model=ModelConfig(
    vocab_size=499,
    width=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=12,
    ff_width=112,
    context=32,
    rope_theta=1e4,
    tied_embeddings=True,
    qkv_bias=True,
  ),
)
# The shape of Qwen2.5-1.5B. Weights, shadow and moments take 14 bytes for each
# of its 1.54e9 parameters, 22 GB; compiled for a TPU, the training step peaks
# at 39 GiB (`python -m train.aot`).
FULL = Setting(
  parameters=300_000_000,
  steps=10,
  copied=2**28,
  rounds=7,
  repeats=3,
  optimizer_seconds=25,
  model_seconds=90,
  prompts=16,
  group=8,
  prompt_tokens=128,
  new_tokens=128,
  micro_batches=4,
  model=PRESETS['Qwen2.5-1.5B'],
)
