import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from train.aot import __main__ as aot
from train.aot import hlo


def inspect(tmp_path, *flags):
  """What the command finds for a small job, and its programs."""
  argv = ['--model=SmolLM2-135M', '--topology=cpu:8', '--prompts=8']
  argv += ['--group=2', '--prompt-tokens=16', '--max-new-tokens=8']
  argv += ['--compute-dtype=float32', *flags]
  done = subprocess.run(
    [sys.executable, '-m', 'train.aot', *argv]
    + [f'--json={tmp_path / "found.json"}', f'--hlo={tmp_path / "hlo"}'],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert 'matrix products' in done.stdout
  texts = {f.stem: f.read_text() for f in (tmp_path / 'hlo').iterdir()}
  return json.loads((tmp_path / 'found.json').read_text()), texts


def test_flops_count_loops_and_fusions():
  def run(x, weights):
    def turn(x, w):
      return jnp.tanh(x @ w), None

    return jax.lax.scan(turn, x, weights)[0] @ weights[0]

  compiled = (
    jax.jit(run).lower(jnp.ones((8, 16)), jnp.ones((5, 16, 16))).compile()
  )
  costs = hlo.Module(compiled.as_text()).costs()
  assert costs.flops == 6 * 2 * 8 * 16 * 16
  assert costs.open_loops == 0 and not costs.collectives


# As a TPU's compiler writes it: one gather spread over two fusions of a loop,
# one all-reduce that is cut at once, a product as a dilated convolution.
TPU_PROGRAM = """HloModule jit_run, is_scheduled=true

%part.1 (p: bf16[1,6,10]) -> bf16[1,48,10] {
  %p = bf16[1,6,10]{2,1,0} parameter(0)
  ROOT %all-gather.1 = bf16[1,48,10]{2,1,0} all-gather(%p), channel_id=7, \
dimensions={1}
}

%part.2 (p: bf16[1,6,10]) -> bf16[1,48,10] {
  %p = bf16[1,6,10]{2,1,0} parameter(0)
  ROOT %all-gather.2 = bf16[1,48,10]{2,1,0:T(8,128)S(1)} all-gather(%p), \
channel_id=7, dimensions={1}
}

%cut (p: bf16[48,10]) -> bf16[6,10] {
  %p = bf16[48,10]{1,0} parameter(0)
  %all-reduce.1 = bf16[48,10]{1,0} all-reduce(%p), channel_id=7, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %slice = bf16[6,10]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero)
}

%inner (p: f32[5,700]) -> f32[1,700] {
  %p = f32[5,700]{1,0} parameter(0)
  %zero = s32[] constant(0)
  ROOT %one = f32[1,700]{1,0} dynamic-slice(%p, %zero, %zero)
}

%outer (p: f32[5,700]) -> f32[1,700] {
  %p = f32[5,700]{1,0} parameter(0)
  %row = f32[1,700]{1,0} fusion(%p), kind=kLoop, calls=%inner
  ROOT %twice = f32[1,700]{1,0} add(%row, %row)
}

%body (s: (s32[], f32[5,700])) -> (s32[], f32[5,700]) {
  %s = (s32[], f32[5,700]{1,0}) parameter(0)
  %w = bf16[1,6,10]{2,1,0} constant({...})
  %g = bf16[48,10]{1,0} constant({...})
  %x = f32[5,700]{1,0} get-tuple-element(%s), index=1
  %fusion.1 = bf16[1,48,10]{2,1,0} fusion(%w), kind=kCustom, calls=%part.1
  %fusion.2 = bf16[1,48,10]{2,1,0:S(1)} fusion(%w), kind=kCustom, calls=%part.2
  %fusion.3 = bf16[6,10]{1,0} fusion(%g), kind=kCustom, calls=%cut
  %fusion.4 = f32[1,700]{1,0} fusion(%x), kind=kLoop, calls=%outer
  ROOT %t = (s32[], f32[5,700]{1,0}) tuple(%s, %x)
}

%cond (s: (s32[], f32[5,700])) -> pred[] {
  %s = (s32[], f32[5,700]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[2,13,17], b: f32[2,17,19]) -> f32[2,13,19] {
  %a = f32[2,13,17]{2,1,0} parameter(0)
  %b = f32[2,17,19]{2,1,0} parameter(1)
  %start = (s32[], f32[5,700]{1,0}) constant({...})
  %loop = (s32[], f32[5,700]{1,0}) while(%start), condition=%cond, body=%body
  ROOT %product = f32[2,13,19]{2,1,0} convolution(%a, %b), \
window={size=2 stride=1 lhs_dilate=2}, dim_labels=0bf_0io->0bf
}
"""


def test_a_tpu_program_is_counted_by_what_it_does():
  costs = hlo.Module(TPU_PROGRAM).costs()
  assert costs.collectives == {
    'all-gather': hlo.Moved(3, 3 * 48 * 10 * 2),
    'reduce-scatter': hlo.Moved(3, 3 * 48 * 10 * 2),
  }
  assert costs.flops == 2 * 2 * 13 * 17 * 19  # a batch of two products
  assert costs.open_loops == 0
  fusions = 2 * 6 * 10 * 2 + 48 * 10 * 2  # .1 and .2, which writes on the chip
  fusions += (48 + 6) * 10 * 2  # .3
  fusions += 2 * 700 * 4  # .4 reads one row of five
  compared = 4 + 4 + 1
  product = 2 * (13 * 17 + 17 * 19 + 13 * 19) * 4
  assert costs.bytes == 3 * (fusions + compared) + product


# A weight of 8 x 6 floats; {S} marks an array that is kept on the chip.
@pytest.mark.parametrize(
  'line, moved',
  [
    ('f32[2,6] slice(%w), slice={[0:2], [0:6]}', 48 + 48),
    ('f32[2,6]{S} slice(%w), slice={[0:2], [0:6]}', 48),
    ('f32[2,6]{S} slice(%fast), slice={[0:2], [0:6]}', 0),
    ('(f32[8,6], f32[2,6]{S}, s32[]{S}) slice-start(%w), slice={[0:2]}', 48),
    ('(f32[8,6]{S}, f32[8,6], u32[]{S}) copy-start(%w)', 192),
    ('(f32[8,6], f32[8,6]{S}, u32[]{S}) copy-start(%fast)', 192),
    ('(f32[8,6], f32[16,6]) all-gather-start(%w), dimensions={0}', 192 + 384),
    ('f32[8,6] dynamic-update-slice(%w, %row, %i, %i)', 24 + 24),
    ('f32[8,6]{S} dynamic-update-slice(%fast, %row, %i, %i)', 24),
    ('f32[8,6] scatter(%w, %i, %row), to_apply=%add', 3 * 24),
    # A fusion inside of a fusion that passes its operand on.
    ('f32[48]{S} fusion(%w), kind=kLoop, calls=%twice', 192),
    ('f32[6]{S} fusion(%w), kind=kLoop, calls=%cut', 24),
  ],
)
def test_what_moves_is_the_part_that_is_read_and_written(line, moved):
  program = f"""HloModule made

%flat (p: f32[8,6]) -> f32[48] {{
  %p = f32[8,6] parameter(0)
  ROOT %all = f32[48] bitcast(%p)
}}

%twice (p: f32[8,6]) -> f32[48] {{
  %p = f32[8,6] parameter(0)
  %all = f32[48] fusion(%p), kind=kLoop, calls=%flat
  ROOT %sum = f32[48] add(%all, %all)
}}

%cut (p: f32[8,6]) -> f32[6] {{
  %p = f32[8,6] parameter(0)
  %all = f32[48] fusion(%p), kind=kLoop, calls=%flat
  ROOT %part = f32[6] slice(%all), slice={{[0:6]}}
}}

ENTRY %main (w: f32[8,6], row: f32[1,6], fast: f32[8,6]) -> f32[8,6] {{
  %w = f32[8,6] parameter(0)
  %row = f32[1,6] parameter(1)
  %fast = f32[8,6]{{S}} parameter(2)
  %i = s32[] constant(0)
  ROOT %moved = {line}
}}
"""
  program = program.replace('{S}', '{0:S(1)}')
  assert hlo.Module(program).costs().bytes == moved


SHARDED = '--mesh=fsdp=8', '--kl-every=0'


@pytest.fixture(scope='module')
def sharded(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sharded')
  return inspect(folder, *SHARDED, '--arm=bf16-sr')


def test_stochastic_rounding_adds_no_collective_and_no_memory(
  sharded, tmp_path
):
  nearest, stochastic = (
    result['programs']['train_step']
    for result, _ in (inspect(tmp_path, *SHARDED, '--arm=bf16'), sharded)
  )
  assert nearest['collectives'] == stochastic['collectives']
  assert nearest['collectives'].keys() >= {'all-gather', 'all-reduce'}
  for name in ('bytes_accessed', 'temporary_bytes', 'peak_bytes'):
    assert stochastic[name] == pytest.approx(nearest[name], rel=0.01), name
  assert nearest['flops'] == stochastic['flops']


def test_a_layer_is_gathered_twice_and_its_gradient_summed_once(sharded):
  """Whatever prompts and completions do: they go through it together."""
  result, _ = sharded
  moved = result['programs']['train_step']['collectives']
  layers, matrices, embed = 30, 7, 49152 * 576
  # Forwards and backwards; what else is gathered are a few small arrays.
  gathers = 2 * layers * matrices
  assert gathers < moved['all-gather']['count'] < 1.1 * gathers
  # The tied embeddings have two gradients, one of them the head's.
  summed = 4 * (result['parameters'] + embed)
  assert moved['all-reduce']['bytes'] == pytest.approx(summed, rel=0.01)


def test_no_sharded_weight_is_whole_on_a_device(sharded):
  result, texts = sharded
  state = result['state_bytes']
  whole = result['parameters'] * 14  # weights 2, shadow 4, moments 8 bytes
  assert sum(state.values()) <= whole / 7
  [step] = [text for name, text in texts.items() if 'train_step' in name]
  shapes = {array.shape for array in hlo.Module(step).arrays()}
  # One layer is gathered at a time, the embeddings once, the rest never.
  assert (49152, 576) in shapes
  stacked = [(30, 576, 9, 64), (30, 576, 3, 64), (30, 9, 64, 576)]
  stacked += [(30, 576, 1536), (30, 1536, 576)]
  assert not shapes & set(stacked)


@pytest.mark.parametrize(
  'flags, message',
  [
    ('--model=gpt-5', "unknown model 'gpt-5'; there are: SmolLM2-135M"),
    ('--topology=v9:2x2', "unknown topology 'v9:2x2'; there are"),
    ('--topology=cpu:8 --mesh=fsdp=7', 'does not multiply to the 8 devices'),
    ('--topology=cpu:8 --mesh=tensor=8', 'not divisible by tensor=8'),
    ('--topology=cpu:8 --prompts=1 --group=3', 'cannot be spread evenly'),
    ('--prompt-tokens=200000', 'prompt_tokens: expected 1 to'),
  ],
)
def test_what_does_not_exist_is_refused(flags, message):
  done = subprocess.run(
    [sys.executable, '-m', 'train.aot', *flags.split()],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert message in done.stderr


def test_a_missing_compiler_says_how_to_install_it(monkeypatch):
  monkeypatch.setitem(sys.modules, 'libtpu', None)
  with pytest.raises(aot.TopologyError, match=r"pip install 'jax\[tpu\]'"):
    aot.find_devices('v5p:2x2x1')


@pytest.mark.slow
def test_stochastic_rounding_adds_nothing_on_a_tpu_either(tmp_path):
  pytest.importorskip('libtpu')
  found = []
  for arm in ('bf16', 'bf16-sr'):
    (tmp_path / arm).mkdir()
    flags = ['--topology=v5p:2x2x2', '--mesh=fsdp=8', f'--arm={arm}']
    flags += ['--compute-dtype=bfloat16']
    # With a few tokens the compiler's prefetching into the chip decides: then
    # stochastic rounding moves 6 % less.
    flags += ['--prompts=16', '--group=8', '--prompt-tokens=512']
    flags += ['--max-new-tokens=1024']
    result, _ = inspect(tmp_path / arm, *flags)
    found.append(result['programs']['train_step'])
  nearest, stochastic = found
  assert nearest['collectives'] == stochastic['collectives']
  for name in ('bytes_accessed', 'temporary_bytes', 'peak_bytes'):
    assert stochastic[name] == pytest.approx(nearest[name], rel=0.01), name


@pytest.mark.slow
def test_a_7b_model_fits_on_64_chips(tmp_path):
  pytest.importorskip('libtpu')
  done = subprocess.run(
    [sys.executable, '-m', 'train.aot', '--mesh=fsdp=16,tensor=4']
    + [f'--json={tmp_path / "found.json"}'],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads((tmp_path / 'found.json').read_text())
  assert found['fits']
  # For every token but the first all weights are read, less the embeddings, of
  # which only rows are; and the cache: of 4 prompts and 32 completions, one
  # key/value head.
  weights = 2 * (found['parameters'] - 152_064 * 3584) / 4
  cache = 2 * 2 * 28 * 128 * (4 * 512 + 32 * 1024)
  read = 1023 * (weights + cache)
  rollout = found['programs']['rollout']['bytes_accessed']
  assert read < rollout < 1.1 * read
  # 16 bytes a parameter, over 64 devices; the norms and biases are not cut.
  assert sum(found['state_bytes'].values()) == pytest.approx(
    found['parameters'] * 16 / 64, rel=0.01
  )
