"""Questions as a chat model is asked: by a Jinja chat template.

A template writes text once, for the prompt, and its special tokens become ids
there. What is sampled behind the prompt is trained on as ids, never decoded
and encoded again.
"""

import datetime
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from train.config import ConfigError
from train.tokenizer import Tokenizer

_NAMED_TOKENS = tuple(
  f'{role}_token' for role in 'bos eos unk sep pad cls mask'.split()
)
_RESERVED = ('messages', 'add_generation_prompt')
# "Today", for templates that tell the date: a prompt is the same every day,
# else no run could be repeated or resumed.
_TODAY = datetime.datetime(2024, 7, 26)
_QUESTION, _ANSWER = 'How many legs have 7 ants?', 'They have 42 legs.'


class ChatError(ConfigError):
  """A chat template that cannot be used, or a text that it must not hold."""


class ChatTokenizer(Tokenizer):
  """A tokenizer that asks questions by a chat template.

  `eos_ids` are those of the model and the token that the template writes
  behind an answer, so a completion ends with its turn.

  Attributes:
    prompt_fingerprint: SHA-256 of template, system prompt and variables.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    template: str,
    *,
    system_prompt: str = '',
    variables: Mapping[str, Any] | None = None,
  ):
    """Compiles the template and tries it.

    Args:
      tokenizer: of the model; its vocabulary is shared, not copied.
      template: Jinja source, with what `transformers` offers to templates.
      system_prompt: what the system says before the question; empty: nothing,
        or what the template says of its own.
      variables: further ones of the template, such as `enable_thinking`.

    Raises:
      ChatError: if the template fails, leaves out question or system prompt,
        or reads none of a variable.
    """
    super().__init__(
      tokenizer._backend, dict(tokenizer._config), tokenizer.eos_ids
    )
    if template != self.chat_template:  # saved with the model
      self._config['chat_template'] = template
    variables = dict(variables or {})
    self._template, written = _compile(template, variables)
    self.prompt_fingerprint = hashlib.sha256(
      json.dumps([template, system_prompt, variables]).encode()
    ).hexdigest()
    self._system = [('system', system_prompt)] if system_prompt else []
    named = {name: self._named(name) for name in _NAMED_TOKENS}
    self._variables = {'tools': None, 'documents': None}
    self._variables |= {k: v for k, v in named.items() if v is not None}
    self._variables |= variables
    # Tokens that are no text: special, or the template's own (`<think>`).
    # Blank ones (a run of spaces) are text even where a template writes them.
    self._control = {
      i: token.content
      for i, token in self._backend.get_added_tokens_decoder().items()
      if token.special or (token.content.strip() and token.content in written)
    }
    prompt = self.render(_QUESTION)
    for name, text in ('question', _QUESTION), ('system prompt', system_prompt):
      if text.strip() not in prompt:
        raise ChatError(f'the chat template leaves out the {name}')
    self.eos_ids = tuple(dict.fromkeys(self.eos_ids + self._end_of_turn()))

  def render(self, question: str) -> str:
    """Returns the text of a prompt, up to where the answer begins.

    Raises:
      ChatError: if the template fails.
    """
    return self._render(('user', question), add_generation_prompt=True)

  def encode_prompt(self, text: str) -> list[int]:
    """Returns the ids of the prompt that asks `text`.

    The template decides about the start token: none is added here.

    Raises:
      ChatError: if the template fails; or a special token is written out in
        `text`, where it could end a turn.
    """
    for i in self.encode(text, special=True):
      if i in self._control:
        raise ChatError(
          f'it contains {self._control[i]!r}, a special token that only the '
          'chat template may write'
        )
    return self.encode(self.render(text), special=True)

  def _render(
    self, *turns: tuple[str, str], add_generation_prompt: bool
  ) -> str:
    messages = [
      {'role': role, 'content': content}
      for role, content in (*self._system, *turns)
    ]
    try:
      return self._template.render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        **self._variables,
      )
    except Exception as error:  # a template may do what Python may
      kind = '' if type(error) is jinja2.TemplateError else type(error).__name__
      raise ChatError(
        'the chat template fails: '
        + ': '.join(filter(None, (kind, str(error))))
      ) from error

  def _end_of_turn(self) -> tuple[int, ...]:
    """The token that the template writes behind an answer, if it does."""
    turns = ('user', _QUESTION), ('assistant', _ANSWER)
    text = self._render(*turns, add_generation_prompt=False)
    _, answer, behind = text.rpartition(_ANSWER)
    ids = self.encode(behind.lstrip(), special=True)[:1] if answer else []
    return tuple(i for i in ids if i in self._control)


def load_chat(
  tokenizer: Tokenizer,
  source: str,
  *,
  system_prompt: str = '',
  variables: Mapping[str, Any] | None = None,
) -> ChatTokenizer:
  """Makes a tokenizer ask by a chat template.

  Args:
    tokenizer: of the model.
    source: `model` for the model's own template, or a file's path.
    system_prompt: see `ChatTokenizer`.
    variables: see `ChatTokenizer`.

  Raises:
    ChatError: if there is no such template, or it cannot be used.
  """
  if source == 'model':
    template = tokenizer.chat_template
    if not isinstance(template, str):
      raise ChatError(
        'the model has no chat template; name a file with --chat-template'
      )
  else:
    try:
      template = Path(source).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
      raise ChatError(
        f'cannot read the chat template {source}: {error}'
      ) from error
  return ChatTokenizer(
    tokenizer, template, system_prompt=system_prompt, variables=variables
  )


def _compile(
  source: str, variables: Mapping[str, Any]
) -> tuple[jinja2.Template, str]:
  """The template, and what it may write of its own, its keywords left out."""
  environment = _environment()
  try:
    template, tree = environment.from_string(source), environment.parse(source)
    read = jinja2.meta.find_undeclared_variables(tree)
  except jinja2.TemplateError as error:
    line = getattr(error, 'lineno', None)
    where = f' in line {line}' if line else ''
    raise ChatError(
      f'the chat template cannot be read{where}: {error.message}'
    ) from error
  for name in variables:
    if name in _RESERVED:
      raise ChatError(f'the chat template variable {name!r} cannot be set')
    if name not in read:
      raise ChatError(
        f'the chat template reads no variable {name!r}; it reads: '
        + ', '.join(sorted(read - set(environment.globals)))
      )
  plain = (node.data for node in tree.find_all(jinja2.nodes.TemplateData))
  constants = (node.value for node in tree.find_all(jinja2.nodes.Const))
  texts = [*plain, *(x for x in constants if isinstance(x, str))]
  return template, '\0'.join(texts)


class _Generation(jinja2.ext.Extension):
  """The tag `generation`, by which templates mark answers: its content."""

  tags = {'generation'}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def _environment() -> jinja2.Environment:
  """What `transformers` offers to templates, which may be anyone's."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['strftime_now'] = _TODAY.strftime
  return environment


def _to_json(
  x, ensure_ascii=False, indent=None, separators=None, sort_keys=False
) -> str:
  """Jinja's own would escape HTML."""
  return json.dumps(
    x,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _raise_exception(message: str):
  raise jinja2.TemplateError(message)
