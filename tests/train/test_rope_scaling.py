"""Stretched RoPE frequencies: by the formulas, and through config.json."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from train import pretrained
from train.model import ModelConfig, RopeScaling, _rotation

LLAMA31 = RopeScaling(8.0, 1.0, 4.0, 8192)
# transformers' names.
SETTINGS = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}


def frequencies(theta=5e5, width=128):
  return theta ** -(np.arange(0, width, 2) / width)


def test_llama31_keeps_short_waves_and_stretches_long_ones():
  # 8192 tokens are 4 turns of a wave of 2048, 1 turn of one of 8192.
  wave = np.array([100, 2048, 2730 + 2 / 3, 4096, 8192, 1e6])
  turns = 8192 / wave  # 81.92, 4, 3, 2, 1, 0.008
  got = LLAMA31.scale(2 * np.pi / wave) * wave / (2 * np.pi)
  # Between: 1/8 + share * 7/8, share = (turns - 1) / 3.
  want = [1, 1, 1 / 8 + 2 / 3 * 7 / 8, 1 / 8 + 1 / 3 * 7 / 8, 1 / 8, 1 / 8]
  np.testing.assert_allclose(turns[1:5], [4, 3, 2, 1], rtol=1e-12)
  np.testing.assert_allclose(got, want, rtol=1e-12)


def test_llama31_frequencies_equal_the_published_branches():
  want = []
  for frequency in frequencies():
    wave = 2 * np.pi / frequency
    if wave < 8192 / 4.0:
      want.append(frequency)
    elif wave > 8192 / 1.0:
      want.append(frequency / 8.0)
    else:
      smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
      want.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
  want = np.array(want)
  np.testing.assert_allclose(LLAMA31.scale(frequencies()), want, rtol=1e-12)
  assert 0 < np.sum(want == frequencies()) < 64  # all three branches
  assert 0 < np.sum(want == frequencies() / 8) < 64


def test_linear_scaling_is_a_slower_clock():
  config = ModelConfig(7, 8, 1, 2, 1, 4, 8, 64, 100.0, True)
  slow = dataclasses.replace(config, rope_scaling=RopeScaling(4.0))
  positions = jnp.arange(0, 32, 4)[None]
  for a, b in zip(
    _rotation(positions, slow), _rotation(positions // 4, config), strict=True
  ):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  'entry, want',
  [
    ({'rope_scaling': SETTINGS}, LLAMA31),
    ({'rope_parameters': SETTINGS | {'rope_theta': 77.0}}, LLAMA31),
    ({'rope_scaling': {'type': 'linear', 'factor': 2}}, RopeScaling(2)),
    (
      {
        'rope_scaling': SETTINGS | {'attention_factor': None},
        'rope_parameters': SETTINGS | {'partial_rotary_factor': 1.0},
      },
      LLAMA31,
    ),
    ({'rope_scaling': {'rope_type': 'default'}}, None),
    ({'rope_scaling': None}, None),
  ],
)
def test_both_spellings_are_read_and_written_back(
  make_folder, tmp_path, entry, want
):
  folder = make_folder()
  file = folder / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | entry))
  loaded = pretrained.load_huggingface(folder)
  assert loaded.config.rope_scaling == want
  theta = entry.get('rope_parameters', {}).get('rope_theta', 100.0)
  assert loaded.config.rope_theta == theta
  saved = tmp_path / 'saved'
  pretrained.save_huggingface(saved, *loaded, dtype=jnp.bfloat16)
  assert pretrained.load_huggingface(saved).config == loaded.config
  if want == LLAMA31:
    written = json.loads((saved / 'config.json').read_text())
    assert written['rope_scaling'] == SETTINGS


@pytest.mark.parametrize(
  'rope, message',
  [
    (
      {'rope_type': 'yarn', 'factor': 4.0},
      "rope_scaling 'yarn'.*is not supported, only default, linear, llama3",
    ),
    ({'rope_type': 'linear'}, "'linear': factor is None, expected a positive"),
    (
      {'type': 'linear', 'factor': '4'},
      "factor is '4', expected a positive",
    ),
    ({'type': 'linear', 'factor': -1.0}, 'factor is -1.0, expected a positive'),
    ({'type': 'linear', 'factor': float('nan')}, 'factor is nan, expected'),
    ({'type': 'linear', 'factor': float('inf')}, 'factor is inf, expected'),
    ({'type': ['linear'], 'factor': 2.0}, r"\['linear'\].*is not supported"),
    (
      SETTINGS | {'high_freq_factor': 0.5},
      'low_freq_factor must be the smaller one',
    ),
    (SETTINGS | {'beta_fast': 32}, "'llama3' with beta_fast is not supported"),
    ({'factor': 4.0}, "'default' with {'factor': 4.0} is not supported"),
  ],
)
def test_what_is_not_understood_is_refused(make_folder, rope, message):
  folder = make_folder()
  file = folder / 'config.json'
  file.write_text(
    json.dumps(json.loads(file.read_text()) | {'rope_scaling': rope})
  )
  with pytest.raises(pretrained.PretrainedError, match=message):
    pretrained.load_huggingface(folder)


def test_two_entries_that_contradict_are_refused(make_folder):
  folder = make_folder()
  file = folder / 'config.json'
  two = {'type': 'linear', 'factor': 2.0}
  file.write_text(
    json.dumps(
      json.loads(file.read_text())
      | {'rope_scaling': two, 'rope_parameters': two | {'factor': 4.0}}
    )
  )
  with pytest.raises(pretrained.PretrainedError, match='contradict'):
    pretrained.load_huggingface(folder)


def test_without_scaling_the_frequencies_are_the_plain_ones():
  config = ModelConfig(7, 8, 1, 2, 1, 128, 8, 64, 5e5, True)
  cos, sin = _rotation(jnp.array([[1]]), config)
  angle = frequencies().astype(np.float32)
  np.testing.assert_array_equal(cos[0, 0, 0], jnp.cos(angle))
  np.testing.assert_array_equal(sin[0, 0, 0], jnp.sin(angle))
