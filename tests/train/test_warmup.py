import jax
from flax import nnx

from train import pretrained, tasks, warmup
from train.answers import Answers
from train.policy import load_policy


def test_tiny_is_taught_once_and_then_read_from_the_cache(
  make_small, tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  taught = []

  def teach(task, tokenizer, config):
    taught.append(task.name)
    texts = [q.prompt + q.answer for q in task.train[:7]]
    assert [tokenizer.decode(tokenizer.encode(t)) for t in texts] == texts
    small = make_small(**vars(config))
    return nnx.to_pure_dict(small.params)

  monkeypatch.setattr(warmup, '_teach', teach)
  task = tasks.load_task('addition', train_size=100, evaluation_size=20)
  path = warmup.tiny(task)
  assert path == warmup.tiny(task)
  assert path.is_relative_to(tmp_path)
  assert taught == ['addition']
  policy = load_policy('tiny', task)
  assert policy.config == warmup.CONFIG
  assert {x.dtype.name for x in jax.tree.leaves(policy.params)} == {'float32'}
  assert taught == ['addition']
  # Other questions are another model.
  more = tasks.load_task('addition', train_size=101, evaluation_size=20)
  assert warmup.tiny(more) != path
  assert taught == ['addition'] * 2
  # It can write every answer, and ends it.
  loaded = pretrained.load_huggingface(path)
  answers = Answers(loaded.tokenizer, loaded.config.vocab_size)
  assert answers.accepted_sequences(task.accepted(task.train[0]), 5)
