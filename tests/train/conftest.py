"""Small decoders, a vocabulary of pieces, and the unshared computation."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from train import __main__, policy, sharding, tasks
from train.config import Config
from train.model import Decoder, ModelConfig
from train.pretrained import save_huggingface
from train.rollout import Prompts
from train.tokenizer import CharTokenizer

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_debug_key_reuse', True)
jax.config.update('jax_num_cpu_devices', 8)  # for the tests that want a mesh

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='session', autouse=True)
def one_device():
  """Runs use one of the devices, unless a test asks for more."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'all_devices', lambda: jax.devices()[:1])
    yield


@pytest.fixture(scope='module')
def quick_compile():
  """Spares LLVM's optimisations, which cost more than small models gain."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='session')
def compiled_folder(tmp_path_factory):
  return tmp_path_factory.mktemp('compiled')


@pytest.fixture(scope='module')
def compile_once(compiled_folder):
  """Runs share what they compile, through a folder."""
  settings = {
    'jax_compilation_cache_dir': str(compiled_folder),
    'jax_persistent_cache_min_compile_time_secs': 0.1,
  }
  before = {name: getattr(jax.config, name) for name in settings}
  for values in (settings, before):
    compilation_cache.reset_cache()
    for name, value in values.items():
      jax.config.update(name, value)
    if values is settings:
      yield


CONFIG = ModelConfig(
  vocab_size=29,
  width=12,
  layers=2,
  heads=4,
  kv_heads=2,
  head_width=6,
  ff_width=14,
  context=64,
  rope_theta=100.0,
  tied_embeddings=True,
)


class Small(NamedTuple):
  """A decoder of a few thousand weights, with logits of a few units."""

  config: ModelConfig
  graphdef: nnx.GraphDef
  params: nnx.State  # float32, on the BF16 grid

  def cast(self, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), self.params)

  def prompts(self, lengths, width, seed=0) -> Prompts:
    """Random prompts, the padding random too."""
    rng = np.random.default_rng(seed)
    size = (len(lengths), width)
    tokens = rng.integers(0, self.config.vocab_size, size)
    return Prompts(
      jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    )

  def tokens(self, batch, time, seed=1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, self.config.vocab_size, (batch, time))
    return jnp.asarray(tokens, jnp.int32)

  def unshared(self, prompts, tokens):
    """Every completion behind its own prompt, for `logits`.

    Returns:
      int32 `[B, S + T]`, and the slots `[B, T]` whose hidden states predict
      the completions.
    """
    prompt_tokens, lengths = map(np.asarray, prompts)
    tokens = np.asarray(tokens)
    batch, time = tokens.shape
    group = batch // len(lengths)
    full = np.zeros((batch, prompt_tokens.shape[1] + time), np.int32)
    slots = np.zeros((batch, time), np.int32)
    for row in range(batch):
      length = lengths[row // group]
      full[row, :length] = prompt_tokens[row // group, :length]
      full[row, length : length + time] = tokens[row]
      slots[row] = length - 1 + np.arange(time)
    return jnp.asarray(full), jnp.asarray(slots)

  def logits(self, params, full, slots, dtype=jnp.float32):
    """float32 `[B, T, V]` by one plain forward, traceable in `params`."""
    model = nnx.merge(self.graphdef, params)
    hidden, _ = model.prefill(full, compute_dtype=dtype)
    hidden = jnp.take_along_axis(hidden, slots[..., None], axis=1)
    return model.logits(hidden, compute_dtype=dtype)

  def numpy_log_p(self, prompts, tokens, temperature=1.0, dtype=jnp.float32):
    """float64 log-probabilities `[B, T, V]` of the unshared computation."""
    full, slots = self.unshared(prompts, tokens)
    batch, time = slots.shape
    # Padded, so that most calls share one compiled shape.
    full = jnp.pad(
      full, [(0, max(15 - batch, 0)), (0, max(13 - full.shape[1], 0))]
    )
    slots = jnp.pad(slots, [(0, max(15 - batch, 0)), (0, max(7 - time, 0))])
    static = self.config, self.graphdef
    logits = _logits(static, self.cast(dtype), full, slots, dtype)
    logits = np.asarray(logits, np.float64)[:batch, :time]
    return log_softmax(logits / temperature)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _logits(static, params, full, slots, dtype):
  return Small(*static, None).logits(params, full, slots, dtype)


def log_softmax(x):
  x = x - x.max(axis=-1, keepdims=True)
  return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def random_params(config, seed=0):
  """No weight at a neutral value, all on the BF16 grid."""
  shapes = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    values = rng.normal(size=leaf.shape) * 0.4
    if 'norm' in jax.tree_util.keystr(path):
      values += 1
    return jnp.asarray(values, jnp.bfloat16).astype(jnp.float32)

  params = nnx.to_pure_dict(nnx.state(shapes, nnx.Param))
  return jax.tree_util.tree_map_with_path(draw, params)


@pytest.fixture(scope='session')
def make_small():
  @functools.cache
  def make(seed=0, **changes) -> Small:
    config = dataclasses.replace(CONFIG, **changes)
    built = policy.build(config, random_params(config, seed))
    return Small(config, *built)

  return make


@pytest.fixture(scope='session')
def small(make_small):
  return make_small()


TEMPERATURE = 0.7  # of `unshared_loss`


@pytest.fixture(scope='module')
def unshared_loss(small):
  """Loss and gradient of the small decoder where nothing is shared.

  Written out: - sum of advantage times log-probability, over sequences times
  longest length (the ratio is 1, and its gradient that of the logarithm).
  """

  @jax.jit
  @jax.value_and_grad
  def run(params, full, slots, tokens, advantages, mask):
    log_p = jax.nn.log_softmax(small.logits(params, full, slots) / TEMPERATURE)
    logprobs = jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]
    return -jnp.sum(advantages[:, None] * logprobs * mask) / mask.size

  return run


class Pieces:
  """A vocabulary with everything that makes endings hard to find.

  Tokens of several characters, newlines before, within and after text, two
  ids for one text, two ways to end (one is written out), a token without
  text, half a character.
  """

  pieces = (
    b'', b'1', b'2', b'12', b' 1', b'\n', b'2\n', b'\n\n', b'\nx', b'',
    b' ', b'2\n1', b'1', b'</s>', b'\xc3', b'\xa9', b'=',
  )  # fmt: skip
  eos_ids = (0, 13)
  pad_id = 0
  vocab_size = len(pieces)

  def token_bytes(self, token_id):
    return self.pieces[token_id] if token_id < len(self.pieces) else b''

  def encode(self, text):
    return [self.pieces.index(character.encode()) for character in text]

  encode_prompt = encode


@pytest.fixture(scope='session')
def pieces():
  return Pieces()


CHARACTERS = '0123456789+= \n'


def save_model(path, tokenizer=None, **changes):
  """Writes an untrained character model as a Hugging Face directory."""
  tokenizer = tokenizer or CharTokenizer(CHARACTERS)
  config = dataclasses.replace(
    CONFIG, **({'vocab_size': tokenizer.vocab_size} | changes)
  )
  params = random_params(config)
  save_huggingface(path, config, params, tokenizer, dtype=jnp.bfloat16)
  return path


@pytest.fixture
def make_folder(tmp_path):
  def make(name='model', **changes):
    return save_model(tmp_path / name, **changes)

  return make


@dataclasses.dataclass(frozen=True)
class Even(tasks.Task):
  """Pays for an even last digit, which an untrained model finds, too."""

  def reward(self, question, completion, *, terminated):
    return float(terminated and completion[-1:] in tuple('02468'))


LOAD_TASK = tasks.load_task


def few_questions(kind=Even, train_size=101):
  """A stand-in for `tasks.load_task` that makes a task of another kind."""

  @functools.cache
  def made():
    task = LOAD_TASK('addition', train_size=train_size, evaluation_size=53)
    return kind(task.name, task.train, task.evaluation, task.best_constant)

  return lambda name, **sizes: made()


DETERMINISTIC = ' --xla_gpu_deterministic_ops=true'


class Runner:
  """Whole runs on `Even`, in this process or in one to be killed."""

  flags = dict(
    task='addition',
    steps=3,
    prompts=3,
    group=5,
    max_new_tokens=6,
    lr=1e-3,
    seed=7,
    eval_questions=29,
  )
  times = ('rollout_seconds', 'train_seconds', 'tokens_per_second')

  def __init__(self, folder, compiled):
    self.model = save_model(folder / 'model', layers=1)
    # The flag that the command has added for this process, and adds again.
    flags = os.environ['XLA_FLAGS'].removesuffix(DETERMINISTIC)
    self._environment = os.environ | {
      'XLA_FLAGS': flags,
      'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'tests/train')]),
      'JAX_PLATFORMS': 'cpu',
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
      'JAX_COMPILATION_CACHE_DIR': str(compiled),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
    }

  def config(self, **changes) -> Config:
    return Config(**self.flags | {'model': str(self.model)} | changes)

  def argv(self, resume=False, **changes):
    """A command line; that of a resumed run names only what changes."""
    flags = changes
    if not resume:
      flags = self.flags | {'model': self.model} | changes
    named = [f'--{k.replace("_", "-")}={v}' for k, v in flags.items()]
    return ['train', *['--resume'] * resume, *named]

  def main(self, **flags):
    """The command in this process: its exit status."""
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(sys, 'argv', self.argv(**flags))
      return __main__.main()

  def start(self, *more, devices=1, **flags) -> subprocess.Popen:
    """The command in a process of its own."""
    return subprocess.Popen(
      [
        sys.executable,
        '-c',
        MAIN,
        str(devices),
        *self.argv(**flags)[1:],
        *more,
      ],
      env=self._environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  @staticmethod
  def read(path):
    """`metrics.jsonl` as strict JSON, which knows neither NaN nor Infinity."""

    def refuse(constant):
      raise AssertionError(f'{constant} in metrics.jsonl')

    lines = (path / 'metrics.jsonl').read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]

  def timeless(self, path):
    """The metrics that the seed decides."""
    return [
      {k: v for k, v in record.items() if k not in self.times}
      for record in self.read(path)
    ]


MAIN = """
import conftest, jax, sys
from train import __main__, processes, tasks
jax.config.update('jax_num_cpu_devices', int(sys.argv.pop(1)))
tasks.load_task = conftest.few_questions()
sys.exit(processes.run(__main__.main))
"""


@pytest.fixture(scope='module')
def runner(tmp_path_factory, compiled_folder, quick_compile, compile_once):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tasks, 'load_task', few_questions())
    yield Runner(tmp_path_factory.mktemp('runs'), compiled_folder)


@pytest.fixture
def more_questions(runner):
  """A stand-in for `tasks.load_task` with one question more."""
  return few_questions(train_size=102)
