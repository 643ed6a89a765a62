"""Tokenizers against references made without them (see `fixtures`)."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
import tokenizers

from train.pretrained import PretrainedError, find_smollm2
from train.tokenizer import CharTokenizer, HuggingFaceTokenizer

FIXTURES = Path(__file__).parent / 'fixtures'
PAIRS = json.loads(
  (FIXTURES / 'smollm2_tokens.json').read_text(encoding='utf-8')
)


@pytest.fixture(scope='module')
def smollm2():
  try:
    path = find_smollm2()
  except PretrainedError as error:
    pytest.skip(str(error))
  return HuggingFaceTokenizer.from_gguf(gguf.GGUFReader(path))


@pytest.fixture
def folder(tmp_path):
  shutil.copytree(FIXTURES / 'llama', tmp_path / 'llama')
  return tmp_path / 'llama'


def edit(file, **changes):
  content = json.loads(file.read_text()) if file.exists() else {}
  file.write_text(json.dumps(content | changes))


def test_smollm2_ids_equal_the_reference(smollm2):
  for pair in PAIRS:
    assert smollm2.encode(pair['text'], special=pair['special']) == pair['ids']


def test_smollm2_text_survives_encoding_and_decoding(smollm2):
  for pair in PAIRS:
    ids = smollm2.encode(pair['text'])
    assert smollm2.decode(ids) == pair['text']
    assert smollm2.decode([smollm2.bos_id, *ids, 2]) == pair['text']


def test_smollm2_special_tokens(smollm2):
  assert smollm2.vocab_size == 49152
  assert (smollm2.eos_ids, smollm2.pad_id, smollm2.bos_id) == ((2,), 2, 1)
  assert '<|im_start|>' in smollm2.chat_template
  assert smollm2.encode_prompt('1') == smollm2.encode('1')  # like the original
  assert smollm2.prompt_fingerprint is None
  assert {smollm2.token_bytes(i) for i in range(17)} == {b''}
  assert smollm2.token_bytes(49152) == b''


def test_token_bytes_find_every_token_with_a_newline(smollm2):
  newlines = [i for i in range(49152) if b'\n' in smollm2.token_bytes(i)]
  assert smollm2.encode('\n')[0] in newlines
  assert smollm2.encode('\n\n\n')[0] in newlines
  assert len(smollm2.encode('\n\n\n')) == 1


def test_a_saved_tokenizer_is_read_back_as_it_was(smollm2, tmp_path):
  smollm2.encode('', special=True)  # leaves no trace in the file
  smollm2.save(tmp_path)
  read = HuggingFaceTokenizer.from_directory(tmp_path)
  assert read.chat_template == smollm2.chat_template
  for name in ('vocab_size', 'eos_ids', 'pad_id', 'bos_id'):
    assert getattr(read, name) == getattr(smollm2, name)
  for pair in PAIRS:
    assert read.encode(pair['text'], special=pair['special']) == pair['ids']
  assert all(
    read.token_bytes(i) == smollm2.token_bytes(i) for i in range(49152)
  )


def test_every_byte_has_its_token():
  tokenizer = HuggingFaceTokenizer.from_directory(FIXTURES / 'llama')
  text = ''.join(map(chr, range(256))) + 'then the 東京 🙂'
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert {tokenizer.token_bytes(i) for i in range(263)} == {
    *(bytes([byte]) for byte in range(256)),
    *(b'th', b'the', b' the', b'an', b''),
  }


def test_a_character_cut_short_becomes_the_replacement_character():
  tokenizer = HuggingFaceTokenizer.from_directory(FIXTURES / 'llama')
  assert tokenizer.decode(tokenizer.encode('a東')[:-1]) == 'a\ufffd'


def test_special_tokens_in_text_are_text_unless_asked_for():
  tokenizer = HuggingFaceTokenizer.from_directory(FIXTURES / 'llama')
  assert tokenizer.encode('<|im_end|>', special=True) == [262]
  ids = tokenizer.encode('<|im_end|>')
  assert 262 not in ids
  assert tokenizer.decode(ids) == '<|im_end|>'


@pytest.mark.parametrize('end', [[], ['<|im_end|>']])
def test_prompts_start_as_the_file_says_and_nothing_else_is_added(folder, end):
  # As in Llama's: every text would start with a start token, and a text that
  # a chat template has written with two.
  edit(
    folder / 'tokenizer.json',
    post_processor={
      'type': 'TemplateProcessing',
      'single': [
        {'SpecialToken': {'id': '<|im_end|>', 'type_id': 0}},
        {'Sequence': {'id': 'A', 'type_id': 0}},
        *({'SpecialToken': {'id': name, 'type_id': 0}} for name in end),
      ],
      'pair': [
        {'Sequence': {'id': 'A', 'type_id': 0}},
        {'Sequence': {'id': 'B', 'type_id': 1}},
      ],
      'special_tokens': {
        '<|im_end|>': {
          'id': '<|im_end|>',
          'ids': [262],
          'tokens': ['<|im_end|>'],
        }
      },
    },
  )
  tokenizer = HuggingFaceTokenizer.from_directory(folder)
  backend = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  assert backend.encode('the').ids[0] == 262  # the file does say so
  plain = tokenizer.encode('the')
  assert [262, *plain] + [262] * len(end) == backend.encode('the').ids
  assert tokenizer.encode_prompt('the') == [262, *plain]
  assert tokenizer.prompt_fingerprint == 'starts with [262]'
  assert tokenizer.encode('<|im_end|>the', special=True).count(262) == 1


def test_generation_config_decides_what_ends_a_text(folder):
  edit(folder / 'generation_config.json', eos_token_id=[262, 260])
  tokenizer = HuggingFaceTokenizer.from_directory(folder)
  assert tokenizer.eos_ids == (262, 260)
  (folder / 'generation_config.json').unlink()
  (folder / 'config.json').unlink()
  tokenizer = HuggingFaceTokenizer.from_directory(folder)
  assert (tokenizer.eos_ids, tokenizer.pad_id) == ((262,), 260)


def test_chat_template_may_have_its_own_file_or_a_name(folder):
  file = folder / 'tokenizer_config.json'
  templates = [{'name': n, 'template': n.upper()} for n in ('tool', 'default')]
  edit(file, chat_template=templates)
  read = HuggingFaceTokenizer.from_directory
  assert read(folder).chat_template == 'DEFAULT'
  (folder / 'chat_template.jinja').write_text('{{ messages }}')
  assert read(folder).chat_template == '{{ messages }}'


def test_sentencepiece_tokens_stand_for_their_bytes(folder):
  edit(folder / 'generation_config.json', eos_token_id=5)
  edit(
    folder / 'tokenizer.json',
    model={
      'type': 'BPE',
      'vocab': {'▁a': 0, '<0x0A>': 1, '<0xE6>': 2},
      'merges': [],
      'byte_fallback': True,
    },
    decoder={
      'type': 'Sequence',
      'decoders': [
        {'type': 'Replace', 'pattern': {'String': '▁'}, 'content': ' '},
        {'type': 'ByteFallback'},
        {'type': 'Fuse'},
      ],
    },
  )
  tokenizer = HuggingFaceTokenizer.from_directory(folder)
  assert tokenizer.token_bytes(0) == b' a'
  assert tokenizer.token_bytes(1) == b'\n'
  assert tokenizer.token_bytes(2) == b'\xe6'


@pytest.mark.parametrize(
  ('name', 'changes', 'message'),
  [
    ('tokenizer_config.json', {'pad_token': 'no'}, "pad_token 'no' is not in"),
    ('generation_config.json', {'eos_token_id': 263}, r'\[263\] are outside'),
  ],
)
def test_tokens_outside_the_vocabulary_are_refused(
  folder, name, changes, message
):
  edit(folder / name, **changes)
  with pytest.raises(ValueError, match=message):
    HuggingFaceTokenizer.from_directory(folder)


def test_a_tokenizer_without_an_end_is_refused(folder):
  for name in ('config.json', 'generation_config.json'):
    (folder / name).unlink()
  edit(folder / 'tokenizer_config.json', eos_token=None)
  with pytest.raises(ValueError, match='no end-of-text token'):
    HuggingFaceTokenizer.from_directory(folder)


def test_characters_survive_encoding_and_decoding(tmp_path):
  tokenizer = CharTokenizer('0123456789+-*= \nß')
  text = '12 + 5 = 17\nß'
  ids = tokenizer.encode(text)
  assert ids[:4] == [2, 3, 15, 11]
  assert len(ids) == len(text)
  assert tokenizer.decode([*ids, 0]) == text
  assert tokenizer.token_bytes(17) == 'ß'.encode()
  assert (tokenizer.vocab_size, tokenizer.eos_ids) == (18, (0,))
  assert (tokenizer.pad_id, tokenizer.bos_id) == (0, None)
  assert tokenizer.chat_template is None

  tokenizer.save(tmp_path)
  read = HuggingFaceTokenizer.from_directory(tmp_path)
  assert (read.encode(text), read.eos_ids) == (ids, (0,))
  assert read.decode(ids) == text


def test_characters_outside_the_vocabulary_are_refused():
  with pytest.raises(ValueError, match=r"not in the vocabulary: \['a', 'b'\]"):
    CharTokenizer('01').encode('0ba1')
  with pytest.raises(ValueError, match='distinct characters'):
    CharTokenizer('010')
