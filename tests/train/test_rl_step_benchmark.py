import json
import sys

import numpy as np
import pytest

from benchmarks import rl_step

pytestmark = pytest.mark.usefixtures('quick_compile', 'compile_once')

OWN = {
  'rollout/shared',
  'rollout/own',
  'train/shared',
  'train/own',
  'train/shared-remat',
}
PROMPTS, GROUP, TOKENS, ROUNDS = 2, 3, 5, 2
FLAGS = {
  'layers': 1,
  'width': 16,
  'heads': 2,
  'kv-heads': 1,
  'ff-width': 24,
  'vocabulary': 31,
  'prompts': PROMPTS,
  'group': GROUP,
  'prompt-tokens': 7,
  'new-tokens': TOKENS,
  'rounds': ROUNDS,
}
# Speaks for Tunix: 0.5 seconds for whatever it is asked.
OTHER = """
import json, sys
shapes = json.loads(sys.argv[1])
about = dict(parameters={parameters}, device_kind='paper', variants={variants})
about |= dict.fromkeys(('google-tunix', 'jax', 'flax', 'optax'), '1.0')
print(json.dumps(about | dict(shapes=shapes)), flush=True)
for line in sys.stdin:
  assert line.strip() in {variants}
  print(0.5, flush=True)
"""


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
  def run(**changes):
    flags = FLAGS | {'json': tmp_path / 'out' / 'report.json'} | changes
    argv = [f'--{name}={value}' for name, value in flags.items()]
    monkeypatch.setattr(sys, 'argv', ['rl_step', *argv])
    rl_step.main()
    return json.loads(flags['json'].read_text()), capsys.readouterr().out

  return run


@pytest.fixture
def other(monkeypatch, tmp_path):
  """A process in the place of Tunix's."""

  def install(parameters, *variants):
    path = tmp_path / 'other.py'
    path.write_text(OTHER.format(parameters=parameters, variants=variants))
    monkeypatch.setattr(rl_step, '_TUNIX', path)

  return install


def weights():
  """By hand: two norms, q and o, k and v, feed-forward; embeddings, norm."""
  return 2 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 31 * 16 + 16


def test_the_report_has_every_variant_with_its_spread_and_what_it_ran_on(
  command, other
):
  both = 'rollout/tunix', 'train/tunix'
  other(weights(), *both)
  report, text = command(**{'tunix-python': sys.executable})
  assert report['parameters'] == weights()
  assert report['tunix']['shapes'].items() >= {
    'width': 16, 'kv_heads': 1, 'head_width': 8, 'group': GROUP,
    'new_tokens': TOKENS,
  }.items()  # fmt: skip
  assert {'device_kind', 'cores', 'jax', 'optax'} <= report['machine'].keys()
  assert report['compute_dtype'] == 'float32'
  rows = report['variants']
  assert set(rows) == OWN | set(both)
  for name, row in rows.items():
    low, middle, high = np.quantile(row['seconds'], (0.25, 0.5, 0.75))
    assert len(row['seconds']) == ROUNDS and min(row['seconds']) > 0
    assert row['quartile_1'] == low and row['quartile_3'] == high
    assert row['median'] == middle
    assert ('tokens_per_second' in row) == name.startswith('rollout/')
    assert name in text
  sampled = PROMPTS * GROUP * TOKENS
  assert rows['rollout/tunix']['tokens_per_second'] == sampled / 0.5
  own = np.array(rows['train/shared']['seconds'])
  assert report['ratios']['train/tunix / train/shared'][
    'median'
  ] == pytest.approx(np.median(0.5 / own))
  assert 'train/own / train/shared' in text


def test_prompts_of_their_own_give_the_completions_of_shared_ones():
  a = rl_step.Arguments(**{n.replace('-', '_'): x for n, x in FLAGS.items()})
  calls = rl_step.variants(a, *rl_step.load(a))
  shared, own = calls['rollout/shared'](), calls['rollout/own']()
  assert shared.tokens.shape == (PROMPTS * GROUP, TOKENS)
  assert np.array_equal(shared.lengths, np.full(PROMPTS * GROUP, TOKENS))
  assert np.array_equal(shared.tokens, own.tokens)
  # Each step starts where the last one ended, a few 1e-6 further.
  steps = [calls[name] for name in sorted(OWN) if name.startswith('train/')]
  norms = [step()['grad_norm'] for step in steps]
  np.testing.assert_allclose(norms, norms[0], rtol=1e-3)


@pytest.mark.parametrize(
  ('count', 'message'), [(7, 'has 7'), ('1/0', 'ended with status 1')]
)
def test_a_tunix_that_counts_other_weights_or_dies_is_an_error(
  monkeypatch, other, count, message
):
  other(count, 'rollout/tunix')
  monkeypatch.setattr(rl_step, 'variants', lambda *_: {})
  flags = {n.replace('-', '_'): x for n, x in FLAGS.items()}
  a = rl_step.Arguments(**flags, tunix_python=sys.executable)
  with pytest.raises(RuntimeError, match=message):
    rl_step.measure(a)
