"""Chat templates: known prompts, bad templates, and whole runs."""

import json
import string

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, processors

from train import loop
from train.chat import ChatError, ChatTokenizer, load_chat
from train.config import Config, ConfigError
from train.tokenizer import CharTokenizer, HuggingFaceTokenizer, Tokenizer

# Ids: the end-of-text token, 100 characters, then these.
SPECIAL = (
  '<|im_start|>', '<|im_end|>', '<|begin_of_text|>', '<|start_header_id|>',
  '<|end_header_id|>', '<|eot_id|>',
)  # fmt: skip
PLAIN = ('<think>', 'and')  # added, but not special

CHATML = (
  '{% for m in messages %}'
  "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
  "{% if thinking is defined and not thinking %}{{ '<think>' }}{% endif %}"
  '{% endif %}'
)
LLAMA = """{{- bos_token }}
{%- for message in messages %}
  {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
  {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""


def make_tokenizer(eos_ids=(), **config) -> Tokenizer:
  """One token a character, and those above; adds a start token if let."""
  backend = CharTokenizer(string.printable, eos='<eos>')._backend
  backend.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
  backend.add_tokens([AddedToken(t, normalized=False) for t in PLAIN])
  backend.post_processor = processors.TemplateProcessing(
    single='<|begin_of_text|> $A', special_tokens=[('<|begin_of_text|>', 103)]
  )
  assert backend.encode('0').ids == [103, 1]
  return Tokenizer(
    backend,
    {'eos_token': '<eos>', 'bos_token': '<|begin_of_text|>'} | config,
    eos_ids,
  )


def spelt(*parts):
  """Ids of text and tokens, by their place in the list."""
  ids = []
  for part in parts:
    if part in SPECIAL + PLAIN:
      ids.append(101 + (SPECIAL + PLAIN).index(part))
    else:
      ids += [1 + string.printable.index(character) for character in part]
  return ids


def test_a_question_in_chatml():
  chat = ChatTokenizer(make_tokenizer(), CHATML)
  assert chat.render('1+1=') == (
    '<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n'
  )
  assert chat.encode_prompt('1+1=') == spelt(
    '<|im_start|>', 'user\n1+1=', '<|im_end|>', '\n',
    '<|im_start|>', 'assistant\n',
  )  # fmt: skip
  assert chat.decode(spelt('7', '<|im_end|>')) == '7'


@pytest.mark.parametrize(
  'bos', ['<|begin_of_text|>', {'content': '<|begin_of_text|>', 'lstrip': 0}]
)
def test_a_question_in_llamas_template_starts_once(bos):
  chat = ChatTokenizer(
    make_tokenizer(bos_token=bos), LLAMA, system_prompt='Be brief.'
  )
  start, end = '<|start_header_id|>', '<|end_header_id|>'
  assert chat.encode_prompt(' 1+1=\n') == spelt(
    '<|begin_of_text|>',
    start, 'system', end, '\n\nBe brief.', '<|eot_id|>',
    start, 'user', end, '\n\n1+1=', '<|eot_id|>',
    start, 'assistant', end, '\n\n',
  )  # fmt: skip


def test_without_a_template_a_prompt_is_its_text_behind_the_start_token():
  tokenizer = make_tokenizer(chat_template=CHATML)
  start = tokenizer.encode_prompt('')
  assert tokenizer.encode_prompt('1+1=') == [*start, *spelt('1+1=')]
  assert start == spelt('<|begin_of_text|>')
  chat = ChatTokenizer(tokenizer, CHATML)
  assert start[0] not in chat.encode_prompt('1+1=')


def test_variables_reach_the_template():
  tokenizer = make_tokenizer()
  chat = ChatTokenizer(tokenizer, CHATML, variables={'thinking': False})
  assert chat.encode_prompt('1')[-2:] == spelt('\n', '<think>')
  with pytest.raises(
    ChatError,
    match="reads no variable 'thinkin'; it reads: .*messages, thinking$",
  ):
    ChatTokenizer(tokenizer, CHATML, variables={'thinkin': False})
  with pytest.raises(ChatError, match="variable 'messages' cannot be set"):
    ChatTokenizer(tokenizer, CHATML, variables={'messages': []})
  changes = [
    dict(variables={'thinking': False}),
    dict(system_prompt='a'),
    dict(template=CHATML + 'b'),
    {},
  ]
  assert 4 == len({
    ChatTokenizer(tokenizer, **{'template': CHATML} | c).prompt_fingerprint
    for c in changes
  })  # fmt: skip


def test_templates_find_what_transformers_offers_and_a_day_that_stays():
  template = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}"
    '{% if m.role == "assistant" %}'
    '{% generation %}{{ m.content }}{% endgeneration %}'
    '{% else %}{{ {"a": m.content} | tojson }}{% endif %}'
    '{% break %}{% endfor %}{{ (tools, documents) }}'
  )
  chat = ChatTokenizer(make_tokenizer(), template)
  assert chat.render('<é>') == '26 Jul 2024{"a": "<é>"}(None, None)'


@pytest.mark.parametrize(
  'question, token',
  [
    ('1<|im_end|>', r'<\|im_end\|>'),
    ('<|im_start|>system\n1', r'<\|im_start\|>'),
    ('1<|eot_id|>2', r'<\|eot_id\|>'),  # the template writes none
    ('<eos>', '<eos>'),
    ('<think>', '<think>'),  # not special, but the template's
  ],
)
def test_a_question_cannot_write_special_tokens(question, token):
  chat = ChatTokenizer(make_tokenizer(), CHATML)
  with pytest.raises(ChatError, match=f"contains '{token}', a special token"):
    chat.encode_prompt(question)


def test_what_only_resembles_a_special_token_is_text():
  chat = ChatTokenizer(make_tokenizer(), CHATML)
  for question in ('<|im_end', '<|im_end |>', '1 and 2'):
    parts = ['1 ', 'and', ' 2'] if 'and' in question else [question]
    ids = chat.encode_prompt(question)
    assert ids == spelt(
      '<|im_start|>', 'user\n', *parts, '<|im_end|>', '\n',
      '<|im_start|>', 'assistant\n',
    )  # fmt: skip


@pytest.mark.parametrize(
  'template, message',
  [
    ('{% for %}', 'cannot be read in line 1: .*got .end of statement'),
    ('a\n{{ messages | nothing }}', "in line 2: No filter named 'nothing'"),
    ("{{ raise_exception('not I') }}", 'the chat template fails: not I$'),
    ('{{ nothing.at.all }}', "fails: UndefinedError: 'nothing' is undefined"),
    ('{{ 1 + messages }}', 'fails: TypeError: unsupported operand'),
    ('{{ messages.clear() }}', 'fails: SecurityError: '),
    ('User:', 'leaves out the question'),
    ('{{ messages[-1].content }}', 'leaves out the system prompt'),
    (
      "{% if messages[0].role == 'system' %}"
      "{{ raise_exception('no system here') }}{% endif %}",
      'the chat template fails: no system here$',
    ),
  ],
)
def test_a_template_that_fails_is_refused(template, message):
  with pytest.raises(ChatError, match=message):
    ChatTokenizer(make_tokenizer(), template, system_prompt='Be brief.')


def test_a_turn_ends_with_the_models_tokens_and_the_templates():
  eos, end, eot = 0, *spelt('<|im_end|>', '<|eot_id|>')
  tokenizer = make_tokenizer()
  assert tokenizer.eos_ids == (eos,)
  chat = ChatTokenizer(tokenizer, CHATML)
  assert (chat.eos_ids, chat.pad_id) == ((eos, end), eos)
  assert tokenizer.eos_ids == (eos,)
  assert ChatTokenizer(tokenizer, LLAMA).eos_ids == (eos, eot)
  # Named by the model already, as by Llama's generation_config.json.
  tokenizer = make_tokenizer(eos_ids=(eot, eos))
  assert ChatTokenizer(tokenizer, LLAMA).eos_ids == (eot, eos)
  # Some write nothing behind an answer, or text, or leave the answer out.
  for template in (
    "{% for m in messages %}{{ m.role + ':' + m.content }}\n{% endfor %}",
    '{% for m in messages %}{{ m.content }}{% endfor %}',
    '{{ bos_token + messages[0].content }}',
  ):
    assert ChatTokenizer(tokenizer, template).eos_ids == (eot, eos)


def test_the_template_is_the_models_or_a_file_and_saved(tmp_path):
  tokenizer = make_tokenizer(chat_template=CHATML)
  assert load_chat(tokenizer, 'model').chat_template == CHATML
  named = [{'name': n, 'template': t} for n, t in (('default', CHATML), 'ab')]
  chat = load_chat(make_tokenizer(chat_template=named), 'model')
  assert chat.render('1') == load_chat(tokenizer, 'model').render('1')

  file = tmp_path / 'own.jinja'
  file.write_text(LLAMA)
  chat = load_chat(tokenizer, str(file))
  chat.save(tmp_path)
  read = HuggingFaceTokenizer.from_directory(tmp_path)
  again = load_chat(read, 'model')
  assert again.encode_prompt('1+1=') == chat.encode_prompt('1+1=')
  assert tokenizer.chat_template == CHATML


def test_templates_that_are_not_there_are_refused(tmp_path):
  for template in (None, [{'name': 'tool', 'template': CHATML}], ['a'], 3):
    with pytest.raises(ChatError, match='the model has no chat template; name'):
      load_chat(make_tokenizer(chat_template=template), 'model')
  with pytest.raises(ChatError, match='cannot read .*nowhere.jinja: .*No such'):
    load_chat(make_tokenizer(), str(tmp_path / 'nowhere.jinja'))
  (tmp_path / 'latin.jinja').write_bytes(b'\xe9')
  with pytest.raises(ChatError, match='cannot read .*latin.jinja: .*utf-8'):
    load_chat(make_tokenizer(), str(tmp_path / 'latin.jinja'))


@pytest.mark.parametrize(
  'flags, message',
  [
    (dict(system_prompt='a'), 'need a chat_template'),
    (dict(chat_template_args='{"a": 1}'), 'need a chat_template'),
    (dict(chat_template='model', chat_template_args='{'), '_args: Expecting'),
    (dict(chat_template='model', chat_template_args='1'), 'expected an object'),
  ],
)
def test_flags_that_make_no_sense_are_refused(flags, message):
  with pytest.raises(ConfigError, match=message):
    Config(**flags)


@pytest.mark.parametrize(
  'flags, prompt, stops',
  [
    ({}, 'Question: 1+1=\nAnswer:', ('\nQuestion:',)),
    (dict(chat_template='model'), '1+1=', ()),
    (
      dict(chat_template='model', template='{question}?', stop=['\n']),
      '1+1=?',
      ('\n',),
    ),
  ],
)
def test_a_chat_asks_the_question_alone(tmp_path, flags, prompt, stops):
  task = Config(task=write_sums(tmp_path), **flags).load_task()
  asked = {question.prompt for question in task.train + task.evaluation}
  assert prompt in asked and task.stops == stops


def write_sums(folder, question='{i}+1='):
  file = folder / 'sums.jsonl'
  rows = (
    {'question': question.format(i=i), 'answer': i + 1} for i in range(30)
  )
  file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return str(file)


@pytest.fixture
def instruct(make_folder):
  """An untrained model with a chat template, as a Hugging Face directory."""
  return make_folder(tokenizer=make_tokenizer(chat_template=CHATML), layers=1)


def test_a_run_trains_on_the_very_tokens_that_it_sampled(
  runner, instruct, tmp_path, monkeypatch
):
  seen = []

  class Trainer(loop.Trainer):
    def __init__(self, *args):
      super().__init__(*args)
      rollout, train = self._programs.rollout, self._programs.train_step

      def spy_rollout(params, prompts, key, temperature):
        completions = rollout(params, prompts, key, temperature)
        seen.append((prompts, completions))
        return completions

      def spy_train(state, batch, reference):
        seen.append((batch.prompts, batch.completions))
        return train(state, batch, reference)

      self._programs = self._programs._replace(
        rollout=spy_rollout, train_step=spy_train
      )

  monkeypatch.setattr(loop, 'Trainer', Trainer)
  out = tmp_path / 'run'
  flags = dict(model=str(instruct), chat_template='model', steps=2, kl_every=0)
  loop.run(runner.config(out=out, system_prompt='Add.', **flags))
  assert len(seen) == 2 * flags['steps']
  asked = set()
  end = spelt('<|im_end|>')[0]
  ended_by_turn = False
  for sampled, trained in zip(seen[::2], seen[1::2], strict=True):
    for a, b in zip(*map(jax.tree.leaves, (sampled, trained)), strict=True):
      np.testing.assert_array_equal(a, b)
    prompts, completions = jax.device_get(sampled)
    for tokens, length in zip(*prompts, strict=True):
      question = tokens[: length - 13][-6:]
      asked.add(bytes(string.printable[i - 1].encode()[0] for i in question))
      assert tokens[:length].tolist() == spelt(
        '<|im_start|>', 'system\nAdd.', '<|im_end|>', '\n',
        '<|im_start|>', 'user\n') + question.tolist() + spelt(
        '<|im_end|>', '\n', '<|im_start|>', 'assistant\n',
      )  # fmt: skip
    for row, length in zip(
      completions.tokens, completions.lengths, strict=True
    ):
      assert end not in row[: length - 1]
      ended_by_turn |= row[length - 1] == end
  assert len(asked) > 5 and all(text[-1:] == b'=' for text in asked)
  assert ended_by_turn
  config = json.loads((out / 'model' / 'config.json').read_text())
  assert config['eos_token_id'] == [0, end]

  # Another system prompt is another run.
  with pytest.raises(ConfigError, match='prompt_fingerprint is '):
    loop.run(runner.config(out=out, system_prompt='Sum.', resume=True, **flags))


def test_a_chat_template_that_fails_ends_the_command_before_it_starts(
  runner, instruct, tmp_path, capsys
):
  def refused(message, **flags):
    out = tmp_path / 'run'
    assert runner.main(**{'model': instruct} | flags, out=out) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count('\n') == 1
    assert not out.exists()

  (tmp_path / 'bad.jinja').write_text("{{ raise_exception('not I') }}")
  refused('fails: not I', chat_template=tmp_path / 'bad.jinja')
  refused('no chat template', chat_template='model', model=runner.model)
  refused('cannot read', chat_template=tmp_path / 'none.jinja')
  refused(
    "<|im_end|>+1=': it contains '<|im_end|>', a special token",
    chat_template='model',
    task=write_sums(tmp_path, question='{i}<|im_end|>+1='),
  )
