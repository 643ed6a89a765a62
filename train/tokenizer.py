"""Text to token ids and back: one interface over the `tokenizers` library.

Whatever the vocabulary (byte-level BPE, SentencePiece with byte fallback,
single characters), every id stands for a fixed string of bytes,
`token_bytes(id)`, and decoding joins them. So the text of a completion does
not depend on what stands before it, and a token that holds a newline can be
found without decoding.
"""

import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

# Files that may name the tokens which end a text, the most specific first.
_EOS_FILES = ('generation_config.json', 'config.json')


class Tokenizer:
  """A vocabulary with its end-of-text, padding and start tokens.

  Attributes:
    vocab_size: One more than the largest id. An embedding may have more rows.
    eos_ids: Ids that end a text, at least one.
    pad_id: Id for padding; often equal to an end-of-text id, so lengths have
      to be carried, not inferred from it.
    bos_id: Id that starts a text, or None. It is never added by `encode`.
    prompt_start: Ids that the tokenizer's own post-processor puts before a text
      (Llama's `<|begin_of_text|>`); often none.
    prompt_fingerprint: Of what `encode_prompt` adds to a text; None: nothing.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    config: dict[str, Any],
    eos_ids: Sequence[int] = (),
  ):
    """Wraps a backend.

    Args:
      backend: Vocabulary, splitting and merges.
      config: What `tokenizer_config.json` holds: `eos_token`, `pad_token`,
        `bos_token` (each a string, or a dict with `content`) and
        `chat_template`, all optional.
      eos_ids: Ids that end a text; `eos_token` alone where empty.

    Raises:
      ValueError: A named token is not in the vocabulary, or none ends a text.
    """
    backend.no_padding()
    backend.no_truncation()
    self._backend = backend
    self._config = config
    self.vocab_size: int = 1 + max(backend.get_vocab().values(), default=-1)
    own = self._id_of('eos_token')
    self.eos_ids = tuple(eos_ids) or (() if own is None else (own,))
    if not self.eos_ids:
      raise ValueError('the tokenizer names no end-of-text token (eos_token)')
    if outside := [i for i in self.eos_ids if not 0 <= i < self.vocab_size]:
      raise ValueError(
        f'end-of-text ids {outside} are outside the vocabulary of '
        f'{self.vocab_size} tokens'
      )
    self.bos_id = self._id_of('bos_token')
    pad_id = self._id_of('pad_token')
    self.pad_id: int = self.eos_ids[0] if pad_id is None else pad_id
    self.prompt_start: tuple[int, ...] = ()
    if backend.post_processor is not None:
      probe = backend.encode('0', add_special_tokens=True)
      added = probe.special_tokens_mask
      text = added.index(0) if 0 in added else 0
      self.prompt_start = tuple(probe.ids[:text])
    self.prompt_fingerprint: str | None = None
    if self.prompt_start:
      self.prompt_fingerprint = f'starts with {list(self.prompt_start)}'

  @property
  def chat_template(self) -> str | None:
    """Jinja source that renders messages to text, or None."""
    template = self._config.get('chat_template')
    if isinstance(template, list):  # several, each with a name
      named = [t for t in template if isinstance(t, dict)]
      template = {t.get('name'): t.get('template') for t in named}
      return template.get('default')
    return template

  def encode_prompt(self, text: str) -> list[int]:
    """Returns the ids of the prompt that asks `text`.

    They start as the model's texts did when it was pretrained, with
    `prompt_start`. A chat template adds turns instead, see
    `chat.ChatTokenizer`.
    """
    return [*self.prompt_start, *self.encode(text)]

  def encode(self, text: str, *, special: bool = False) -> list[int]:
    """Returns the ids of `text`, with nothing added before or after.

    Args:
      text: Any text.
      special: Whether special tokens written out in `text` (as a chat template
        does) become their ids. Off by default: the text of a task or a user
        has no business to end a turn.

    Returns:
      Token ids.
    """
    self._backend.encode_special_tokens = not special
    return self._backend.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`; special tokens are left out.

    Bytes that are not UTF-8 (a character cut short) become U+FFFD.
    """
    text = b''.join(self.token_bytes(i) for i in ids)
    return text.decode('utf-8', errors='replace')

  def token_bytes(self, token_id: int) -> bytes:
    """Returns the bytes a token stands for: b'' if special or not in use."""
    return self._bytes.get(int(token_id), b'')

  def save(self, directory: str | Path) -> None:
    """Writes the two files that `transformers.AutoTokenizer` reads."""
    directory = Path(directory)
    self._backend.encode_special_tokens = False  # `transformers` parses them
    self._backend.save(str(directory / 'tokenizer.json'))
    (directory / 'tokenizer_config.json').write_text(
      json.dumps(self._config, indent=2, ensure_ascii=False) + '\n',
      encoding='utf-8',
    )

  def _named(self, role: str) -> str | None:
    token = self._config.get(role)
    if isinstance(token, dict):  # a serialised AddedToken
      token = token.get('content')
    return token

  def _id_of(self, role: str) -> int | None:
    token = self._named(role)
    if token is None:
      return None
    token_id = self._backend.token_to_id(token)
    if token_id is None:
      raise ValueError(f'{role} {token!r} is not in the vocabulary')
    return token_id

  @functools.cached_property
  def _bytes(self) -> dict[int, bytes]:
    decoder = json.dumps(json.loads(self._backend.to_str())['decoder'])
    if '"ByteLevel"' in decoder:
      of = _byte_level_bytes
    elif '"ByteFallback"' in decoder:
      of = _byte_fallback_bytes
    else:
      of = str.encode
    table = {
      i: of(token)
      for token, i in self._backend.get_vocab(with_added_tokens=False).items()
    }
    for i, token in self._backend.get_added_tokens_decoder().items():
      table[i] = b'' if token.special else token.content.encode()
    return table


class HuggingFaceTokenizer(Tokenizer):
  """The tokenizer of a pretrained model."""

  @classmethod
  def from_directory(cls, path: str | Path) -> Self:
    """Reads `tokenizer.json` and the settings that lie beside it.

    Args:
      path: A folder in Hugging Face's layout.

    Returns:
      The tokenizer.

    Raises:
      ValueError: A file is missing or broken; the message names it.
    """
    path = Path(path)
    file = path / 'tokenizer.json'
    if not file.is_file():
      raise ValueError(f'{path} has no tokenizer.json')
    try:
      backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
      raise ValueError(f'{file} cannot be read: {error}') from error
    config = read_json(path / 'tokenizer_config.json')
    template = path / 'chat_template.jinja'
    if template.is_file():
      config['chat_template'] = template.read_text(encoding='utf-8')
    for name in _EOS_FILES:
      found = read_json(path / name).get('eos_token_id')
      if found is not None:
        eos_ids = found if isinstance(found, list) else [found]
        return cls(backend, config, eos_ids)
    return cls(backend, config)

  @classmethod
  def from_gguf(cls, reader: Any) -> Self:
    """Rebuilds the byte-level BPE stored in a GGUF file.

    SmolLM2 has no token for 21 bytes (rare control characters, and bytes that
    UTF-8 does not use); as in the original, encoding drops them.

    Args:
      reader: A `gguf.GGUFReader`.

    Returns:
      The tokenizer.

    Raises:
      ValueError: The file has no tokenizer, or one of another kind.
    """

    def field(name):
      entry = reader.get_field(f'tokenizer.{name}')
      return None if entry is None else entry.contents()

    kind = field('ggml.model'), field('ggml.pre')
    if kind != ('gpt2', 'smollm'):
      raise ValueError(
        f'the tokenizer (model, pre) is {kind}, supported: (gpt2, smollm)'
      )
    tokens, merges = field('ggml.tokens'), field('ggml.merges')
    types = field('ggml.token_type')
    if not (tokens and merges and types):
      raise ValueError('the tokenizer lacks tokens, merges or token types')
    try:
      model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(' ')) for merge in merges],
      )
    except Exception as error:  # the library raises nothing more precise
      raise ValueError(f'the merges cannot be used: {error}') from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
      [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
      ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
      [
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == 3  # control
      ]
    )
    config = _settings(chat_template=field('chat_template'))
    for role, name in (('bos', 'bos'), ('eos', 'eos'), ('pad', 'padding')):
      token_id = field(f'ggml.{name}_token_id')
      if token_id is not None:
        config[f'{role}_token'] = tokens[token_id]
    return cls(backend, config)


class CharTokenizer(Tokenizer):
  r"""One token a character, and one that ends a text (id 0, also padding).

  >>> tokenizer = CharTokenizer('0123456789+= \n')
  >>> tokenizer.encode('1+1=')
  [2, 11, 2, 12]
  >>> tokenizer.decode([3, 0])
  '2'
  """

  def __init__(self, characters: str, eos: str = '<eos>'):
    """Builds the vocabulary.

    Args:
      characters: Every character, once each; ids count from 1.
      eos: Name of the token that ends a text.

    Raises:
      ValueError: No character, or one twice.
    """
    if not characters or len(set(characters)) < len(characters):
      raise ValueError(f'expected distinct characters, got {characters!r}')
    self.characters = characters
    vocab = {token: i for i, token in enumerate([eos, *characters])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(
      tokenizers.Regex(r'[\s\S]'), behavior='isolated'
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([eos])
    super().__init__(backend, _settings(eos_token=eos, pad_token=eos))

  def encode(self, text: str, *, special: bool = False) -> list[int]:
    """Returns the ids of `text`; ValueError for a character without one."""
    if not special and (unknown := set(text) - set(self.characters)):
      raise ValueError(f'characters not in the vocabulary: {sorted(unknown)}')
    return super().encode(text, special=special)


def _settings(**settings: str | None) -> dict[str, Any]:
  """A `tokenizer_config.json` that leaves everything to `tokenizer.json`."""
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'clean_up_tokenization_spaces': False,
    **{name: value for name, value in settings.items() if value is not None},
  }


def read_json(file: Path) -> dict[str, Any]:
  """Returns the object in a JSON file, {} without one; else ValueError."""
  if not file.is_file():
    return {}
  try:
    content = json.loads(file.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{file.name} is not valid JSON: {error}') from error
  if not isinstance(content, dict):
    raise ValueError(f'{file.name} does not hold a JSON object')
  return content


@functools.cache
def _byte_of_character() -> dict[str, int]:
  """GPT-2's alphabet: printable bytes are themselves, others U+0100 on."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  table = {chr(byte): byte for byte in printable}
  return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_bytes(token: str) -> bytes:
  table = _byte_of_character()
  if not all(character in table for character in token):
    return token.encode()  # an added token, stored as it is written
  return bytes(table[character] for character in token)


def _byte_fallback_bytes(token: str) -> bytes:
  if match := re.fullmatch(r'<0x([0-9A-F]{2})>', token):
    return bytes.fromhex(match[1])
  return token.replace('▁', ' ').encode()
