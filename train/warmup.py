"""`tiny`, `tiny-wide`: small character models, taught until worth training.

Supervised learning on the task's own training questions stops at a chosen
expected reward, so that reinforcement has something to reinforce and something
left to gain. The result is cached.
"""

import dataclasses
import hashlib
import json
import os
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from train import pretrained
from train.answers import Answers
from train.config import ConfigError
from train.evaluate import Evaluator
from train.model import Decoder, ModelConfig
from train.tasks import Task, data_order
from train.tokenizer import CharTokenizer

TARGET = 0.30  # expected reward on held-out questions
CONFIG = ModelConfig(
  vocab_size=97,
  width=128,
  layers=4,
  heads=4,
  kv_heads=2,
  head_width=32,
  ff_width=512,
  context=512,
  rope_theta=1e4,
  tied_embeddings=True,
)
CONFIGS = {
  'tiny': CONFIG,
  'tiny-wide': dataclasses.replace(CONFIG, width=192, heads=6, ff_width=768),
}
_BATCH = 256
_LEARNING_RATE = 2e-3
_CHECK_EVERY = 20  # steps; near the target four times as often
_MOST_STEPS = 4000
_QUESTIONS = 240


def cache_folder() -> Path:
  """Where warmed-up models are kept."""
  cache = Path(os.environ.get('XDG_CACHE_HOME', Path.home() / '.cache'))
  return cache / 'sr-optax'


def tiny(task: Task, name: str = 'tiny') -> Path:
  """Returns a model's Hugging Face directory for a task, made if missing.

  Args:
    task: what it is taught.
    name: one of `CONFIGS`.

  Raises:
    ConfigError: if the target is not reached.
  """
  config = CONFIGS[name]
  judged = dataclasses.replace(task, evaluation=task.evaluation[:_QUESTIONS])
  recipe = [vars(config), judged.fingerprint(), TARGET, _BATCH, _LEARNING_RATE]
  digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
  path = cache_folder() / f'{name}-{task.name}-{digest}'
  if not path.exists():
    print(
      f'Warming up {name} on {task.name} (once; kept in {path})', flush=True
    )
    tokenizer = CharTokenizer('\n' + string.printable[:95])
    params = _teach(task, tokenizer, config)
    pretrained.save_huggingface(
      path, config, params, tokenizer, dtype=jnp.float32
    )
  return path


def _teach(task: Task, tokenizer: CharTokenizer, config: ModelConfig) -> dict:
  examples = [
    (tokenizer.encode(q.prompt), tokenizer.encode(q.answer + '\n'))
    for q in task.train
  ]
  width = max(len(prompt) + len(answer) for prompt, answer in examples)
  tokens = np.full((len(examples), width), tokenizer.pad_id, np.int32)
  taught = np.zeros((len(examples), width), bool)
  for i, (prompt, answer) in enumerate(examples):
    tokens[i, : len(prompt) + len(answer)] = prompt + answer
    taught[i, len(prompt) : len(prompt) + len(answer)] = True

  model = Decoder(config, rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(model, nnx.Param)
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adam(optax.warmup_constant_schedule(0.0, _LEARNING_RATE, 50)),
  )
  evaluator = Evaluator(
    graphdef,
    task,
    Answers(tokenizer, config.vocab_size),
    questions=_QUESTIONS,
    prompt_width=max(len(tokenizer.encode(q.prompt)) for q in task.evaluation),
    max_new_tokens=max(len(answer) for _, answer in examples) + 1,
    temperature=1.0,
    compute_dtype=jnp.float32,
  )

  @jax.jit
  def step(params, opt_state, tokens, taught):
    def loss(params):
      inputs, targets = tokens[:, :-1], tokens[:, 1:]
      model = nnx.merge(graphdef, params)
      hidden, _ = model.prefill(inputs)
      logits = model.logits(hidden, compute_dtype=jnp.float32)
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
      mask = taught[:, 1:]
      return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.sum(mask)

    updates, opt_state = tx.update(jax.grad(loss)(params), opt_state)
    return optax.apply_updates(params, updates), opt_state

  opt_state, reached = tx.init(params), 0.0
  for i in range(1, _MOST_STEPS + 1):
    rows = data_order(len(examples), 0, (i - 1) * _BATCH, _BATCH)
    params, opt_state = step(params, opt_state, tokens[rows], taught[rows])
    if i % (_CHECK_EVERY // (4 if reached > TARGET / 3 else 1)) == 0:
      reached = evaluator(params).mean
      if reached >= TARGET:
        print(f'expected reward {reached:.3f} after {i} steps')
        return nnx.to_pure_dict(params)
  raise ConfigError(
    f'the model reached {reached:.3f} of {TARGET} on {task.name} in {i} steps'
  )
