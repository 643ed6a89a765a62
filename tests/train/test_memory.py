"""What the compiled programs hold at once: bytes, nothing is run or timed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from train import arms, losses
from train.model import Decoder
from train.rollout import Completions, Prompts
from train.scoring import token_scores
from train.step import Batch, Objective, Reference, TrainState, train_step

pytestmark = pytest.mark.usefixtures('quick_compile')

VOCAB = 151_936  # that of Qwen2 and Qwen3
PROMPTS, GROUP, WIDTH = 3, 11, 17
BATCH = PROMPTS * GROUP
TIME = 61  # a prime: chunks of it need padding
LOGITS = 256 * VOCAB * 4  # bytes that `scoring` makes at a time, in float32
Shape = jax.ShapeDtypeStruct
# Logits enter the gradient by clipped ratios and by the exact divergence.
OBJECTIVE = Objective(
  functools.partial(losses.ppo_clip, clip_low=0.2, clip_high=0.2),
  kl_penalty=0.1,
)


def abstract(config, dtype):
  model = nnx.eval_shape(
    lambda: Decoder(config, param_dtype=dtype, rngs=nnx.Rngs(0))
  )
  return nnx.split(model, nnx.Param)


def step(config, *, time, arm='fp32', dtype='float32', **options):
  """Memory of a compiled training step, and its state; nothing is allocated."""
  arm = arms.ARMS[arm]
  graphdef, params = abstract(config, arm.param_dtype)
  tx = arms.optimizer(arm, 1e-6, jax.random.key(0))
  state = TrainState(params, jax.eval_shape(tx.init, params))
  rows = functools.partial(Shape, (BATCH,))
  tokens = functools.partial(Shape, (BATCH, time))
  batch = Batch(
    Prompts(Shape((PROMPTS, WIDTH), jnp.int32), Shape((PROMPTS,), jnp.int32)),
    Completions(
      tokens(jnp.int32), tokens(jnp.float32), rows(jnp.int32), rows(bool)
    ),
    rows(jnp.float32),
    rows(bool),
    tokens(jnp.float32),
  )
  reference = Reference(
    abstract(config, jnp.bfloat16)[1],
    Shape((BATCH, time, config.width), dtype),
  )
  made = train_step(
    graphdef,
    tx,
    temperature=0.7,
    compute_dtype=jnp.dtype(dtype),
    objective=OBJECTIVE,
    **options,
  )
  lowered = made.lower(state, batch, reference)
  return lowered.compile().memory_analysis(), state


@pytest.mark.parametrize(
  'dtype, tied', [('float32', True), ('bfloat16', False)]
)
def test_a_step_never_holds_all_logits_of_a_large_vocabulary(
  small, dtype, tied
):
  config = dataclasses.replace(
    small.config, vocab_size=VOCAB, tied_embeddings=tied, layers=1
  )
  memory, _ = step(config, time=TIME, dtype=dtype, remat=True)
  # Two policies, and in the backward pass what leads to a gradient. Of all
  # 33 x 61 tokens at once, one policy's logits would already be 8 times these.
  assert memory.temp_size_in_bytes < 5 * LOGITS


def test_scoring_never_holds_all_logits_of_a_large_vocabulary(small):
  config = dataclasses.replace(small.config, vocab_size=VOCAB)
  graphdef, params = abstract(config, jnp.bfloat16)

  def scores(params, hidden, tokens):
    return token_scores(
      nnx.merge(graphdef, params),
      hidden,
      tokens,
      temperature=0.7,
      compute_dtype=jnp.bfloat16,
    )

  compiled = jax.jit(scores).lower(
    params,
    Shape((BATCH, TIME, config.width), jnp.bfloat16),
    Shape((BATCH, TIME), jnp.int32),
  )
  memory = compiled.compile().memory_analysis()
  # And what a softmax makes of them on the way.
  assert memory.temp_size_in_bytes < 3 * LOGITS


def test_with_remat_a_step_keeps_one_layer_of_products(small):
  config = dataclasses.replace(
    small.config, layers=7, width=64, heads=4, head_width=16, ff_width=160
  )
  plain, remat = (
    step(config, time=TIME, remat=remat)[0].temp_size_in_bytes
    for remat in (False, True)
  )
  c = config
  heads = c.heads * c.head_width
  # float32 per token and layer: q, k, v; scores over prompt and completion;
  # attention over both; its output; gate, up, down.
  numbers = heads + 2 * c.kv_heads * c.head_width
  numbers += c.heads * (WIDTH + TIME) + 2 * heads + c.width
  numbers += 2 * c.ff_width + c.width
  layer = BATCH * TIME * numbers * 4
  # In the backward pass both hold the products of one layer.
  assert plain - remat > (config.layers - 2) * layer


def test_a_step_never_holds_all_attention_scores_of_a_long_completion(small):
  config = dataclasses.replace(small.config, layers=1, context=4096)
  time = 2063  # a prime: blocks of it end with a shorter one
  memory, _ = step(config, time=time, remat=True)
  scores = BATCH * config.heads * time * (WIDTH + time) * 4
  assert memory.temp_size_in_bytes < scores


@pytest.mark.parametrize('arm', ['fp32', 'bf16-sr', 'bf16-sr-pure', 'fp16'])
def test_a_step_writes_the_new_state_over_the_old(small, arm):
  config = dataclasses.replace(small.config, width=96, layers=1)
  memory, state = step(config, time=3, arm=arm)
  arrays = [x for x in jax.tree.leaves(state) if x.ndim]
  held = sum(x.size * x.dtype.itemsize for x in arrays)
  parameters = sum(x.size for x in jax.tree.leaves(state.params))
  assert held >= 6 * parameters  # weights and moments, most of them shadows
  # A key is in the state but not read, and counters are few bytes.
  assert memory.alias_size_in_bytes > held - 100
  # All that is new are metrics.
  new = memory.output_size_in_bytes - memory.alias_size_in_bytes
  assert new < parameters / 10
