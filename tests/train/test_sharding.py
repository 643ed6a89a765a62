"""One model and one seed on five meshes of eight devices."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sr_optax
from train import (
  arms,
  loop,
  policy,
  pretrained,
  processes,
  programs,
  sharding,
)
from train.config import Config
from train.fingerprint import fingerprint
from train.rollout import Prompts
from train.step import Batch, Reference, TrainState

MESHES = ('', 'data=8', 'fsdp=8', 'data=2,fsdp=2,tensor=2', 'fsdp=2,tensor=4')
SEVERAL = MESHES[1:]
SIZES = dict(width=16, kv_heads=4, ff_width=32, vocab_size=32)
KEY = jax.random.key(3)
TIME = 6
# Logits of a few units, each known to some 40 roundings; measured differences
# between meshes are below a tenth of it.
BOUND = 40 * 8 * 2.0**-24


def mesh_of(text):
  devices = jax.devices()
  return sharding.make_mesh(text, devices if text else devices[:1])


@pytest.fixture(scope='module')
def decoder(make_small):
  return make_small(**SIZES)


class Run:
  """The programs of a run on a mesh, and its start."""

  def __init__(self, small, mesh, **flags):
    given = dict(prompts=4, group=4, max_new_tokens=TIME, lr=1e-3)
    self.config = Config(**given | flags)
    self.mesh, self.params = mesh, None
    arm = arms.ARMS[self.config.arm]
    tx = arms.optimizer(arm, self.config.lr, jax.random.key(5))
    endings = np.zeros((1, small.config.vocab_size), np.int32)
    endings[0, 0] = 1  # token 0 ends a completion
    with jax.set_mesh(mesh):
      where = sharding.shardings(small.params, mesh)
      self.weights = jax.device_put(small.params, where)
      self.programs = programs.build(
        self.config,
        small.graphdef,
        tx,
        endings=endings,
        compute_dtype=jnp.float32,
        mesh=mesh,
        weights=self.weights,
      )
      self.state = TrainState(*self.programs.start(self.weights))
    self.copies = programs.prompt_copies(self.config, mesh)

  def prompts(self, small):
    lengths = np.array([3, 5, 1, 4][: self.config.prompts])
    whole = small.prompts(lengths, 5)
    return Prompts(*(np.repeat(x, self.copies, axis=0) for x in whole)), whole

  def rollout(self, prompts, weights=None, temperature=1.0):
    with jax.set_mesh(self.mesh):
      params = self.state.params if weights is None else weights
      sampled = self.programs.rollout(params, prompts, KEY, temperature)
      return jax.device_get(sampled)

  def train(self, prompts, completions):
    """State and metrics after one step with made-up advantages."""
    size = completions.lengths.size
    worth = np.float32(np.random.default_rng(0).normal(size=size))
    batch = Batch(prompts, completions, worth, np.ones(size, bool))
    with jax.set_mesh(self.mesh):
      reference = self.programs.reference(self.weights)
      hidden = self.programs.hidden(reference, prompts, completions.tokens)
      state = jax.tree.map(jnp.copy, self.state)  # the step donates it
      return self.programs.train_step(
        state, batch, Reference(reference, hidden)
      )


@pytest.fixture(scope='module')
def run_on(decoder, quick_compile):
  return functools.cache(
    lambda mesh, **flags: Run(decoder, mesh_of(mesh), **flags)
  )


@pytest.fixture(scope='module')
def sampled(run_on, decoder):
  """What one device samples."""
  alone = run_on('')
  return alone.rollout(alone.prompts(decoder)[0])


def test_rounding_noise_is_the_same_on_every_mesh(decoder):
  rng = np.random.default_rng(1)
  shadow = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), decoder.params
  )
  bits = {}
  for text in MESHES:
    mesh = mesh_of(text)
    with jax.set_mesh(mesh):
      placed = jax.device_put(shadow, sharding.shardings(shadow, mesh))
      rounded = jax.jit(sr_optax.stochastic_round_tree)(KEY, placed)
    bits[text] = [np.asarray(x).tobytes() for x in jax.tree.leaves(rounded)]
  assert all(bits[text] == bits[''] for text in SEVERAL)


@pytest.mark.parametrize('mesh', SEVERAL)
def test_equal_logits_give_equal_tokens(run_on, decoder, mesh):
  # Without weights all logits are 0: the random numbers decide alone.
  got = []
  for text in ('', mesh):
    run = run_on(text)
    nothing = jax.tree.map(lambda x: x * 0, run.state.params)
    got.append(run.rollout(run.prompts(decoder)[0], nothing))
  np.testing.assert_array_equal(got[0].tokens, got[1].tokens)
  np.testing.assert_array_equal(got[0].lengths, got[1].lengths)
  assert len(np.unique(got[0].tokens)) > 16


@pytest.mark.parametrize('mesh', SEVERAL)
def test_tokens_differ_only_where_the_logits_cannot_tell(
  run_on, decoder, sampled, mesh
):
  run = run_on(mesh)
  prompts, whole = run.prompts(decoder)
  got = run.rollout(prompts)
  log_p = decoder.numpy_log_p(whole, sampled.tokens)
  equal = 0
  for row in range(16):
    row_key = jax.random.fold_in(KEY, row)
    for t in range(sampled.lengths[row]):
      noise = jax.random.gumbel(jax.random.fold_in(row_key, t), (32,))
      second, best = np.sort(log_p[row, t] + np.asarray(noise))[-2:]
      if best - second > 2 * BOUND:
        assert got.tokens[row, t] == sampled.tokens[row, t]
        equal += 1
      elif got.tokens[row, t] != sampled.tokens[row, t]:
        break
  assert equal > 30
  mask = sampled.mask & (got.tokens == sampled.tokens)
  np.testing.assert_allclose(
    got.logprobs[mask], sampled.logprobs[mask], rtol=0, atol=BOUND
  )


@pytest.mark.parametrize('mesh', SEVERAL)
@pytest.mark.parametrize('flags', [{}, dict(micro_batch=2)])
def test_the_first_step_is_the_same_within_rounding(
  run_on, decoder, sampled, mesh, flags
):
  results = []
  for text in ('', mesh):
    run = run_on(text, **flags)
    prompts, whole = run.prompts(decoder)
    with jax.set_mesh(run.mesh):
      logprobs = run.programs.logprobs(
        run.state.params, prompts, sampled.tokens
      )
    state, metrics = run.train(prompts, sampled)
    # Adam's first moment is (1 - b1) times the clipped gradient.
    moments = optimizer_moments(state.opt_state)
    results.append((np.asarray(logprobs), metrics, moments))
  (one, metrics, moments), (other, others, other_moments) = results
  want = decoder.numpy_log_p(whole, sampled.tokens)
  want = np.take_along_axis(want, sampled.tokens[..., None], axis=-1)[..., 0]
  for got in (one, other):
    np.testing.assert_allclose(got, want, rtol=0, atol=BOUND)
  for name in ('loss', 'grad_norm', 'entropy', 'kl_exact'):
    np.testing.assert_allclose(
      metrics[name], others[name], rtol=1e-5, atol=1e-6
    )
  assert metrics['grad_norm'] > 0.1
  # Each gradient sums some hundred terms of up to its largest.
  for a, b in zip(moments, other_moments, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(a).max())
    assert np.abs(a).max() > 0


def optimizer_moments(opt_state):
  leaves = jax.tree.leaves_with_path(opt_state)
  return [
    np.asarray(leaf)
    for path, leaf in leaves
    if '/mu/' in jax.tree_util.keystr(path, simple=True, separator='/')
  ]


@pytest.mark.parametrize('mesh', ['data=2,fsdp=2,tensor=2', 'fsdp=8'])
def test_a_mesh_repeats_itself_bit_for_bit(run_on, decoder, mesh):
  run = run_on(mesh)
  prompts, _ = run.prompts(decoder)
  seen = []
  for _ in range(2):
    completions = run.rollout(prompts)
    state, metrics = run.train(prompts, completions)
    leaves = jax.tree.leaves((completions, state, metrics))
    seen.append([np.asarray(leaf).tobytes() for leaf in leaves])
  assert seen[0] == seen[1]


@pytest.mark.parametrize('mesh', ['fsdp=8', 'fsdp=2,tensor=4'])
def test_no_device_holds_more_than_its_share(run_on, decoder, sampled, mesh):
  run = run_on(mesh)
  state, _ = run.train(run.prompts(decoder)[0], sampled)
  for tree in (run.state, state, run.weights):
    here, whole = 0, 0
    for path, leaf in jax.tree.leaves_with_path(tree):
      spec = leaf.sharding.spec
      if leaf.ndim > 1 and 'norm' not in jax.tree_util.keystr(path):
        assert math.prod(leaf.sharding.shard_shape(leaf.shape)) * 8 == leaf.size
        assert spec == sharding.partition(
          jax.tree_util.keystr(path, simple=True, separator='/')
        )
      here += leaf.addressable_shards[0].data.nbytes
      whole += leaf.nbytes
    assert here <= whole / 7


def test_prompts_that_do_not_divide_are_repeated(run_on, decoder):
  alone, spread = run_on('', prompts=2), run_on('data=8', prompts=2)
  assert (alone.copies, spread.copies) == (1, 4)
  prompts, whole = spread.prompts(decoder)
  assert prompts.tokens.shape == (8, 5)
  one, other = alone.rollout(whole), spread.rollout(prompts)
  np.testing.assert_array_equal(one.tokens, other.tokens)  # no close call
  a, b = alone.train(whole, one)[1], spread.train(prompts, one)[1]
  np.testing.assert_allclose(a['loss'], b['loss'], rtol=1e-5)
  np.testing.assert_allclose(a['grad_norm'], b['grad_norm'], rtol=1e-5)


def test_copies():
  mesh = mesh_of('data=2,fsdp=4')
  assert sharding.copies(16, 3, mesh) == 1
  assert sharding.copies(4, 6, mesh) == 2
  assert sharding.copies(12, 4, mesh) == 2
  with pytest.raises(sharding.MeshError, match='5 completions of a prompt by'):
    sharding.copies(4, 5, mesh)


def test_weights_are_read_by_the_devices_that_hold_them(
  make_folder, monkeypatch
):
  folder = make_folder(width=16, kv_heads=4, ff_width=32)
  whole = pretrained.load_huggingface(folder).read()
  read = []
  original = pretrained.Stored.__getitem__

  def spy(self, index):
    part = original(self, index)
    read.append(part.size)
    return part

  monkeypatch.setattr(pretrained.Stored, '__getitem__', spy)
  mesh = mesh_of('fsdp=2,tensor=4')
  monkeypatch.setattr(
    sharding, 'RULES', sharding.RULES | {'embed': P(None, 'fsdp')}
  )  # this vocabulary is odd
  loaded = policy.load_policy(str(folder), None, mesh)
  size = sum(x.size for x in jax.tree.leaves(whole))
  assert sum(read) < 2 * size  # eight whole copies would be 8
  assert max(read) == whole['blocks']['gate'].size // 8
  for path, leaf in jax.tree.leaves_with_path(loaded.params):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    expected = whole
    for part in name.removesuffix('/value').split('/'):
      expected = expected[part]
    np.testing.assert_array_equal(leaf, expected.astype(np.float32))
  other = policy.load_policy(str(folder), None)
  assert fingerprint(other.params) == fingerprint(loaded.params)
  moved = jax.tree.map(lambda x: x.at[..., 0].add(1), other.params)
  moved = other._replace(params=moved)
  assert fingerprint(moved.params) != fingerprint(loaded.params)


def test_a_run_on_a_mesh_resumes_on_another(
  runner, make_folder, tmp_path, monkeypatch
):
  monkeypatch.setattr(sharding, 'all_devices', jax.devices)
  model = make_folder(width=16, kv_heads=4, layers=1, vocab_size=32)
  flags = dict(model=str(model), prompts=4, group=4, eval_samples=4)
  out = tmp_path / 'run'

  def run(**changes):
    loop.run(runner.config(**flags | changes))

  run(out=out, mesh='data=2,fsdp=2,tensor=2', steps=2, filter_groups='refill')
  run(out=out, mesh='fsdp=8', steps=3, filter_groups='refill', resume=True)
  run(out=tmp_path / 'one', mesh='fsdp=8', steps=3, filter_groups='refill')
  resumed, straight = runner.timeless(out), runner.timeless(tmp_path / 'one')
  for a, b in zip(resumed, straight, strict=True):
    for name in ('loss', 'grad_norm', 'entropy', 'reward_mean'):
      assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
  saved = json.loads((out / 'config.json').read_text())
  assert (saved['mesh'], saved['device'][:3]) == ('fsdp=8', '8 x')


@pytest.mark.parametrize(
  'text, message',
  [
    ('fdsp=8', "the axis 'fdsp' does not exist; there are: data, fsdp, tensor"),
    ('fsdp=2,fsdp=4', "the axis 'fsdp' is there twice"),
    ('fsdp=0', 'expected fsdp=N with N >= 1'),
    ('fsdp=two', 'expected fsdp=N with N >= 1'),
    ('fsdp', 'expected fsdp=N with N >= 1'),
    ('data=-1,fsdp=-1', 'only one axis can be -1'),
    ('data=3,fsdp=-1', 'does not multiply to the 8 devices'),
    ('data=2,fsdp=2', 'does not multiply to the 8 devices'),
    ('data=16', 'does not multiply to the 8 devices'),
  ],
)
def test_a_mesh_that_does_not_exist(text, message):
  with pytest.raises(sharding.MeshError, match=message):
    sharding.make_mesh(text, jax.devices())


def test_what_does_not_fit_is_named(decoder):
  mesh = mesh_of('fsdp=2,tensor=4')
  with pytest.raises(sharding.MeshError, match="no sharding rule .* 'adapter'"):
    sharding.shardings({'adapter': jnp.zeros((8, 8))}, mesh)
  odd = {'blocks': {'gate': jnp.zeros((2, 16, 30))}}
  with pytest.raises(sharding.MeshError, match='blocks/gate.*30 .*by tensor=4'):
    sharding.shardings(odd, mesh)
  with pytest.raises(sharding.MeshError, match='does not fit .*gate'):
    sharding.shardings({'blocks': {'gate': jnp.zeros((16, 30))}}, mesh)
  with pytest.raises(sharding.MeshError, match='9 heads .* by tensor=4'):
    sharding.check_heads(9, 3, mesh)
  with pytest.raises(sharding.MeshError, match='2 key/value heads'):
    sharding.check_heads(8, 2, mesh)


@pytest.mark.parametrize(
  'options', [{}, dict(qkv_bias=True), dict(qk_norm=True)]
)
def test_every_parameter_of_every_family_has_its_rule(make_small, options):
  params = make_small(tied_embeddings=False, **SIZES, **options).params
  where = sharding.shardings(params, mesh_of('fsdp=2,tensor=2,data=2'))
  assert len(jax.tree.leaves(where)) == len(jax.tree.leaves(params))


@pytest.mark.parametrize(
  'mesh, message',
  [
    ('fsdp=8', 'blocks/down.*12 is not divisible by fsdp=8'),
    ('data=7', 'does not multiply to the 8 devices'),
    ('tensor=8', 'heads of the model are not divisible by tensor=8'),
    ('data=8', 'cannot be spread evenly'),
  ],
)
def test_the_command_says_what_does_not_fit(
  runner, tmp_path, monkeypatch, capsys, mesh, message
):
  monkeypatch.setattr(sharding, 'all_devices', jax.devices)
  assert runner.main(out=tmp_path / 'run', mesh=mesh) == 2
  assert re.search(message, capsys.readouterr().err)
  assert not (tmp_path / 'run').exists()


def test_rows_that_a_process_owns_are_all_rows_once():
  mesh = mesh_of('data=2,fsdp=2,tensor=2')
  x = jax.device_put(np.arange(24).reshape(8, 3), sharding.rows(mesh))
  owned = processes.own_rows(x)
  assert list(owned) == list(range(8))
  np.testing.assert_array_equal(np.stack(list(owned.values())), x)
  replicated = jax.device_put(np.arange(8), NamedSharding(mesh, P()))
  assert list(processes.own_rows(replicated)) == list(range(8))
