"""The configuration of a run: every flag, its default and its unit."""

import dataclasses
import json
import re
from pathlib import Path

from train import advantages, arms, losses, sharding, tasks
from train.data_sets import GYM, load_gym, load_jsonl

COMPUTE_DTYPES = ('auto', 'float32', 'bfloat16', 'float16')
LOSS_SCALERS = ('auto', 'off')
TRACKERS = ('off', 'wandb', 'trackio')
PROCESS_FLAGS = (
  'distributed',
  'coordinator_address',
  'num_processes',
  'process_id',
)
FILTERS = ('off', 'drop', 'refill')
# How far a ratio may fall below and rise above 1, by loss: each paper's bounds.
CLIPS = {
  'policy-gradient': (None, None),
  'ppo': (0.2, 0.2),
  'gspo': (3e-4, 4e-4),
  'cispo': (None, 4.0),
}
# Few-shot style, for models that continue a text.
_TEMPLATE, _STOP = 'Question: {question}\nAnswer:', ('\nQuestion:',)


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
  chain_sum, addition; a JSONL file with questions and answers (GSM8K, MATH);
  or reasoning_gym:NAME, any of its data sets."""
  eval_data: Path | None = None
  """JSONL file of held-out questions; default: a tenth of the task's."""
  task_config: str = '{}'
  """Settings of a reasoning_gym:NAME, as JSON."""
  template: str | None = None
  """How a question of a file or of reasoning_gym:NAME is asked; default:
  'Question: {question}\\nAnswer:', by a chat template '{question}'."""
  stop: tuple[str, ...] | None = None
  """Strings that end a completion there, beside end-of-text; default:
  '\\nQuestion:', by a chat template none."""
  chat_template: str = 'none'
  """What a question is wrapped in: none; model (the chat template of an
  instruct model, which --model brings along); or the path of a Jinja file."""
  system_prompt: str = ''
  """What the system says before a question; needs a chat template."""
  chat_template_args: str = '{}'
  """Variables of the chat template, as JSON: '{"enable_thinking": false}'."""
  reward: str = ''
  """module:function(prompt, completion, answer) -> float, for a JSONL file;
  default: math-verify."""
  reward_timeout: float = 5.0
  """Seconds a verdict on one completion may take; then it earns 0."""
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
  advantage: str = 'dr-grpo'
  """What a completion was worth; one of: dr-grpo, grpo, rloo, reinforce++,
  reinforce++-baseline."""
  loss: str = 'policy-gradient'
  """policy-gradient (importance-weighted), ppo (clipped), gspo or cispo. With
  one update per rollout the ratios are 1 and all agree."""
  clip_low: float | None = None
  """How far a ratio may fall below 1; default: 0.2 (ppo), 3e-4 (gspo)."""
  clip_high: float | None = None
  """How far it may rise above 1; default: 0.2 (ppo; DAPO's clip-higher: 0.28),
  4e-4 (gspo), 4 (cispo)."""
  aggregation: str = 'constant'
  """constant (sum over tokens / (completions x longest), as Dr.GRPO),
  token-mean (DAPO) or sequence-mean (GRPO)."""
  updates: int = 1
  """Optimizer steps per rollout, each on its share of the prompts."""
  micro_batch: int = 0
  """Prompts per forward and backward pass, with their completions; gradients
  add up. 0: all of an update's. Less memory, same gradients."""
  filter_groups: str = 'off'
  """Groups whose rewards are all equal: off (they count), drop (they do not),
  refill (more prompts are sampled in their place)."""
  refill_rounds: int = 4
  """Rollouts per step at most, with --filter-groups refill."""
  correction: str = 'off'
  """Importance weights of trainer against sampler: off, token-truncated,
  token-masked, sequence-truncated or sequence-masked."""
  correction_cap: float = 2.0
  """Largest such weight."""
  lr: float = 2e-6
  """Learning rate of AdamW, constant."""
  seed: int = 0
  """Of prompts, samples and rounding."""
  out: Path | None = None
  """Run folder, new or empty; default: runs/DATE-MODEL-TASK-ARM."""
  mesh: str = 'data=1,fsdp=-1,tensor=1'
  """Devices along each axis, -1: the rest. Prompts and completions are spread
  over data and fsdp, weights over fsdp and tensor."""
  distributed: bool = False
  """One of several processes, all started with the same flags; JAX finds the
  others by itself on TPU slices, under SLURM, Open MPI and on GKE."""
  coordinator_address: str | None = None
  """HOST:PORT of the first process, where JAX does not find it by itself."""
  num_processes: int | None = None
  """How many there are, likewise."""
  process_id: int | None = None
  """Which of them this is, from 0, likewise."""
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
  eval_temperature: float | None = None
  """Of these completions; default: that of training. The exact expected reward
  keeps the training's."""
  eval_top_k: int = 0
  """Only the k most likely tokens, in these completions; 0: all. Training
  always samples from the whole distribution."""
  eval_top_p: float = 1.0
  """Only the fewest tokens with this probability together, likewise."""
  eval_min_p: float = 0.0
  """Only tokens with this share of the largest probability, likewise."""
  kl_every: int = 1
  """Steps between measurements of the KL divergence from the reference; 0
  keeps no reference."""
  kl_penalty: float = 0.0
  """Weight of the KL divergence in the loss; needs --kl-every 1."""
  remat: bool = True
  """Recompute layers in the backward pass: less memory, more time."""
  log_completions: int = 4
  """Completions of each step written to RUN/completions.jsonl, with their
  prompts and rewards; 0: none."""
  checkpoint_every: int = 0
  """Steps between checkpoints; 0: at the end and when told to stop (SIGTERM,
  SIGINT)."""
  keep: int = 2
  """Checkpoints kept."""
  save_final: bool = True
  """Save checkpoint, weights and picture at the end; off: metrics only (a run
  told to stop still saves its checkpoint)."""
  tensorboard: bool = False
  """Write the metrics to RUN/tensorboard as well (needs tensorboardX)."""
  tracker: str = 'off'
  """Send the metrics to wandb or trackio, if installed."""
  resume: bool = False
  """Continue the run in --out from its last checkpoint. Flags that are not
  given keep the value they had."""

  def __post_init__(self):  # noqa: D105
    # As they come back from a run's config.json.
    if self.stop is not None:
      object.__setattr__(self, 'stop', tuple(self.stop))
    if isinstance(self.eval_data, str):
      object.__setattr__(self, 'eval_data', Path(self.eval_data))
    for name, known in (
      ('arm', arms.ARMS),
      ('advantage', advantages.ADVANTAGES),
      ('loss', CLIPS),
      ('aggregation', losses.AGGREGATIONS),
      ('correction', losses.CORRECTIONS),
      ('filter_groups', FILTERS),
      ('compute_dtype', COMPUTE_DTYPES),
      ('loss_scaler', LOSS_SCALERS),
      ('tracker', TRACKERS),
    ):
      value = getattr(self, name)
      if value not in known:
        raise ConfigError(
          f'unknown {name.replace("_", " ")} {value!r}; there are: '
          + ', '.join(known)
        )
    if self.group < 2:
      raise ConfigError(
        f'group: expected at least 2 completions per prompt, got {self.group} '
        '(the advantage is the difference from the group mean)'
      )
    for name in (
      'steps',
      'prompts',
      'max_new_tokens',
      'keep',
      'updates',
      'refill_rounds',
    ):
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
      'micro_batch',
      'eval_top_k',
      'log_completions',
      'checkpoint_every',
    ):
      if getattr(self, name) < 0:
        raise ConfigError(f'{name}: expected >= 0, got {getattr(self, name)}')
    self._check_task()
    self._check_chat()
    for name in (
      'lr',
      'temperature',
      'reward_scale',
      'correction_cap',
      'reward_timeout',
    ):
      value = getattr(self, name)
      if not 0 < value < float('inf'):
        raise ConfigError(f'{name}: expected a positive number, got {value}')
    self._check_clips()
    if self.eval_temperature is not None and not (
      0 < self.eval_temperature < float('inf')
    ):
      raise ConfigError(
        'eval_temperature: expected a positive number (greedy accuracy is '
        f'measured beside), got {self.eval_temperature}'
      )
    if not 0 < self.eval_top_p <= 1:
      raise ConfigError(
        f'eval_top_p: expected above 0 and at most 1, got {self.eval_top_p}'
      )
    if not 0 <= self.eval_min_p <= 1:
      raise ConfigError(
        f'eval_min_p: expected between 0 and 1, got {self.eval_min_p}'
      )
    if self.prompts % self.updates:
      raise ConfigError(
        f'updates: expected a divisor of prompts, {self.prompts}, got '
        f'{self.updates}'
      )
    per_update = self.prompts // self.updates
    if self.micro_batch and per_update % self.micro_batch:
      raise ConfigError(
        f'micro_batch: expected a divisor of the {per_update} prompts of an '
        f'update, got {self.micro_batch}'
      )
    if not 0 <= self.kl_penalty < float('inf'):
      raise ConfigError(f'kl_penalty: expected >= 0, got {self.kl_penalty}')
    if self.kl_penalty and self.kl_every != 1:
      raise ConfigError(
        f'kl_penalty needs kl_every=1 (a reference at every step), got '
        f'kl_every={self.kl_every}'
      )
    self._check_effects()
    self._check_processes()
    if self.out is not None and re.match(r'[a-z]\w+:/', str(self.out)):
      raise ConfigError(
        f'out: expected a folder of a mounted file system, got the URL '
        f'{self.out}'
      )
    if self.resume and self.out is None:
      raise ConfigError('resume: name the run folder with --out')
    if self.eval_samples % self.group:
      raise ConfigError(
        f'eval_samples: expected a multiple of group, {self.group} (they share '
        f'one compiled rollout), got {self.eval_samples}'
      )

  @property
  def clips(self) -> tuple[float | None, float | None]:
    """Bounds `(clip_low, clip_high)` of the loss; None where it has none."""
    given = self.clip_low, self.clip_high
    known = CLIPS[self.loss]
    return tuple(
      k if g is None else g for g, k in zip(given, known, strict=True)
    )

  @property
  def micro_batches(self) -> int:
    """Parts that an update is worked off in."""
    per_update = self.prompts // self.updates
    return per_update // self.micro_batch if self.micro_batch else 1

  @property
  def own_data(self) -> bool:
    """Whether the task is a file or a data set by name."""
    return self.task.endswith('.jsonl') or self.task.startswith(GYM)

  def load_task(self) -> tasks.Task:
    """Loads the task that the flags describe.

    Raises:
      TaskError: see `tasks.load_task`, `data_sets`.
    """
    if not self.own_data:
      return tasks.load_task(
        self.task, evaluation_size=max(240, self.eval_questions)
      )
    chat = self.chat_template != 'none'
    template, stops = ('{question}', ()) if chat else (_TEMPLATE, _STOP)
    options = dict(
      template=template if self.template is None else self.template,
      stops=stops if self.stop is None else self.stop,
      timeout=self.reward_timeout,
    )
    if self.task.startswith(GYM):
      settings = json.loads(self.task_config)
      return load_gym(self.task.removeprefix(GYM), config=settings, **options)
    return load_jsonl(
      Path(self.task), held_out=self.eval_data, reward=self.reward, **options
    )

  def _check_task(self) -> None:
    if not self.own_data and self.task not in tasks.TASKS:
      raise ConfigError(
        f'unknown task {self.task!r}; there are: {", ".join(tasks.TASKS)}, '
        f'the path of a .jsonl file, or {GYM}NAME'
      )
    if not self.task.endswith('.jsonl') and (self.reward or self.eval_data):
      raise ConfigError('reward and eval_data need a JSONL file as task')
    try:
      if not isinstance(json.loads(self.task_config), dict):
        raise ValueError('expected an object')
    except ValueError as error:
      raise ConfigError(f'task_config: {error}') from error
    if not all(self.stop or ()):
      raise ConfigError('stop: a stop string must not be empty')
    gym = self.task.startswith(GYM)
    for name, idle in (
      ('template', not self.own_data and self.template is not None),
      ('stop', not self.own_data and self.stop is not None),
      ('task_config', not gym and json.loads(self.task_config) != {}),
    ):
      if idle:
        raise ConfigError(f'{name} does not apply to the task {self.task}')

  def _check_chat(self) -> None:
    try:
      variables = json.loads(self.chat_template_args)
      if not isinstance(variables, dict):
        raise ValueError('expected an object')
    except ValueError as error:
      raise ConfigError(f'chat_template_args: {error}') from error
    if self.chat_template == 'none' and (self.system_prompt or variables):
      raise ConfigError(
        'system_prompt and chat_template_args need a chat_template'
      )

  def _check_effects(self) -> None:
    """Refuses what would be recorded although it had no effect."""
    sampled = ('eval_temperature', 'eval_top_k', 'eval_top_p', 'eval_min_p')
    refill = self.filter_groups == 'refill'
    defaults = {field.name: field.default for field in dataclasses.fields(self)}
    for needed, given, names in (
      ('eval_samples', self.eval_samples > 0, sampled),
      ('filter_groups=refill', refill, ('refill_rounds',)),
      ('a correction', self.correction != 'off', ('correction_cap',)),
    ):
      for name in names:
        if not given and getattr(self, name) != defaults[name]:
          raise ConfigError(f'{name} has no effect without {needed}')

  def _check_processes(self) -> None:
    sharding.parse_mesh(self.mesh)
    named = self.coordinator_address, self.num_processes, self.process_id
    given = [x is not None for x in named]
    if any(given) and not (all(given) and self.distributed):
      raise ConfigError(
        'coordinator_address, num_processes and process_id go together, and '
        'with distributed'
      )
    if all(given) and not 0 <= self.process_id < self.num_processes:
      raise ConfigError(
        f'process_id: expected 0 to {self.num_processes - 1}, got '
        f'{self.process_id}'
      )
    if self.distributed and self.out is None:
      raise ConfigError(
        'distributed: name a run folder that all processes see with --out'
      )

  def _check_clips(self) -> None:
    known = dict(zip(('clip_low', 'clip_high'), CLIPS[self.loss], strict=True))
    for name, default in known.items():
      value = getattr(self, name)
      if value is None:
        continue
      if default is None:
        raise ConfigError(f'{name}: the loss {self.loss} has no such bound')
      if not 0 < value < (1 if name == 'clip_low' else float('inf')):
        raise ConfigError(
          f'{name}: expected a positive number'
          + (' below 1' if name == 'clip_low' else '')
          + f', got {value}'
        )
