"""Plants classic faults in a copy of `sr_optax`; each must fail the tests.

    python tests/mutation_check.py [NAME ...]

Copies the package and its tests to a temporary folder, replaces one piece of
text at a time, and runs the test files that are about it, stopping at the first
failure. Prints a Markdown table (kept in `docs/mutation_check.md`); exit status
1 if a fault survives.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Fault(NamedTuple):
  """A fault: what it is, where, the text to replace, the tests about it."""

  name: str
  file: str
  old: str
  new: str
  tests: str


FAULTS = (
  Fault(
    'no NaN guard',
    'rounding.py',
    'result = jnp.where(magnitude < _U32(_INF32), finite, result)',
    'result = kept + carry',
    'rounding',
  ),
  Fault(
    '15 bits of noise',
    'rounding.py',
    'return bits >> _U32(16) if',
    'return bits >> _U32(17) << _U32(1) if',
    'sticking noise',
  ),
  Fault(
    'FP16 with 16 bits of noise',
    'rounding.py',
    'target == jnp.bfloat16 else bits\n',
    'target == jnp.bfloat16 else bits >> _U32(16) << _U32(16)\n',
    'noise',
  ),
  Fault(
    'the same key for every leaf',
    'noise.py',
    'return leaf_key(path_hashes(paths))',
    "return leaf_key(path_hashes([''] * len(paths)))",
    'noise',
  ),
  Fault(
    'the key of a leaf from its last name only',
    'noise.py',
    'blake2b(path.encode(),',
    "blake2b(path.split('/')[-1].encode(),",
    'noise',
  ),
  Fault(
    'silently round to nearest',
    'link.py',
    'if leaf_key is None:',
    'if True:',
    'link',
  ),
  Fault(
    'carry off by one',
    'rounding.py',
    'carry = (dropped + u) >> _U32(16)',
    'carry = (dropped + u + _U32(1)) >> _U32(16)',
    'rounding',
  ),
  Fault(
    'FP16 comparison off by one',
    'rounding.py',
    'carry = ((dropped + u) < u)',
    'carry = ((dropped + u) <= u)',
    'rounding',
  ),
  Fault(
    'FP16 subnormals shifted by one bit',
    'rounding.py',
    'count = _U32(126) - ',
    'count = _U32(125) - ',
    'rounding',
  ),
  Fault(
    'sign of a zero lost',
    'rounding.py',
    '(sign | result).astype(jnp.uint16)',
    '(jnp.where(result == 0, result, sign | result)).astype(jnp.uint16)',
    'rounding',
  ),
  Fault(
    'finite values overflow to Inf',
    'rounding.py',
    'finite = jnp.minimum(kept + carry, inf - _U32(1))',
    'finite = kept + carry',
    'rounding',
  ),
  Fault(
    'the shadow is not saturated',
    'link.py',
    's = rounding.saturate(s + u.astype(jnp.float32), self.target)',
    's = s + u.astype(jnp.float32)',
    'link',
  ),
  Fault(
    'noise from the index within an eighth of the leaf (a shard)',
    'noise.py',
    '  x = lo * (leaf_key[1] | _U32(1)) + leaf_key[0]',
    '  lo = lo % _U32(max(1, math.prod(shape) // 8))\n'
    '  x = lo * (leaf_key[1] | _U32(1)) + leaf_key[0]',
    'noise',
  ),
  Fault(
    'noise shared by the rows of a leaf',
    'noise.py',
    'stride *= shape[axis]',
    'stride *= 0',
    'noise',
  ),
  Fault(
    'high word of the index dropped',
    'noise.py',
    'x if hi is None else x + _mix(hi)',
    'x',
    'noise',
  ),
  Fault(
    'no carry into the high word of the index',
    'noise.py',
    'hi = hi + term_hi + carry',
    'hi = hi + term_hi',
    'noise',
  ),
  Fault(
    'one round of mixing less',
    'noise.py',
    'x = (x ^ (x >> _U32(15))) * _U32(0x735A2D97)',
    'pass',
    'noise',
  ),
  Fault(
    'leaves walk along one sequence, from different origins',
    'noise.py',
    'x = lo * (leaf_key[1] | _U32(1)) + leaf_key[0]',
    'x = lo + leaf_key[0]',
    'noise',
  ),
  Fault(
    'noise that does not depend on the step',
    'link.py',
    'noise.fold(words, state.count // int(self.refresh_every))',
    'noise.fold(words, 0)',
    'link',
  ),
  Fault(
    'refresh_every ignored',
    'link.py',
    'noise.fold(words, state.count // int(self.refresh_every))',
    'noise.fold(words, state.count)',
    'link',
  ),
  Fault(
    'key of the state ignored on restore',
    'link.py',
    'words = state.key',
    'words = self.words',
    'link',
  ),
  Fault(
    'last_key not kept',
    'link.py',
    'state = state._replace(last_key=last_key)',
    'pass',
    'link',
  ),
  Fault(
    'residual16: no rule for zeros',
    'residual.py',
    'carry = jnp.where(magnitude == _U32(0), _U32(0), carry)',
    'pass',
    'residual',
  ),
  Fault(
    'residual16: no rule for Inf and NaN',
    'residual.py',
    'lo = jnp.where(not_finite, _U32(0), lo)',
    'pass',
    'link',
  ),
  Fault(
    'residual16: carry not undone',
    'residual.py',
    '(q - carry) << _U32(16)',
    'q << _U32(16)',
    'residual',
  ),
  Fault(
    'foreign weights not adopted',
    'link.py',
    'jnp.where(foreign, to_float32(p), s)',
    's',
    'link',
  ),
  Fault(
    'update emitted in the type of the weight',
    'link.py',
    'emitted[path] = difference(q, p)',
    'emitted[path] = difference(q, p).astype(p.dtype)',
    'landing',
  ),
  Fault(
    'update rounded to the type of the weight before it is added',
    'link.py',
    's + u.astype(jnp.float32)',
    's + u.astype(p.dtype).astype(jnp.float32)',
    'link',
  ),
  Fault(
    'an update of +0.0 where nothing changes',
    'link.py',
    'jnp.where(same, jnp.float32(-0.0),',
    'jnp.where(same, jnp.float32(0.0),',
    'landing',
  ),
  Fault(
    'the shadow overwritten by its rounding',
    'link.py',
    'store[path] = self._store(s)',
    'store[path] = self._store(to_float32(q))',
    'link',
  ),
  Fault(
    'count not advanced',
    'link.py',
    'state._replace(count=optax.safe_increment(state.count))',
    'state',
    'link',
  ),
  Fault(
    'the key of the transform in the donated state',
    'link.py',
    'words = jnp.array(self.words, copy=True)',
    'words = jnp.asarray(self.words)',
    'state',
  ),
  Fault(
    'chain: moments initialised from BF16',
    'chain.py',
    'return link_lib.to_float32(x) if self.link.rounds(x) else x',
    'return x',
    'chain',
  ),
  Fault(
    'chain: gradients not widened',
    'chain.py',
    '    return link_lib.to_float32(g)\n  return g',
    '    return g\n  return g',
    'chain',
  ),
  Fault(
    'chain: weight decay of the visible weights',
    'chain.py',
    'fp32_params = paths.replace(params, dict(shadow))',
    'fp32_params = params',
    'chain',
  ),
  Fault(
    'resync keeps the old residual',
    'state.py',
    'values[path] = jnp.zeros_like(s)',
    'values[path] = s',
    'state',
  ),
  Fault(
    'apply_updates adds instead of writing',
    'state.py',
    'return jnp.where((bits & jnp.uint32(0x7FFFFFFF)) == 0, p, q)',
    'return optax.apply_updates(p, u)',
    'landing',
  ),
  Fault(
    'the attribute of an NNX variable in the path',
    'paths.py',
    "if path[-1].name in ('value', 'raw_value'):",
    'if False:',
    'paths',
  ),
)


def run(folder: pathlib.Path, tests: str) -> str | None:
  """Runs test files in the copy; the first test that fails, or None."""
  files = [f'tests/sr_optax/test_{name}.py' for name in tests.split()]
  done = subprocess.run(
    [sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider']
    + files,
    cwd=folder,
    env=os.environ | {'PYTHONPATH': str(folder)},
    capture_output=True,
    text=True,
  )
  if done.returncode == 0:
    return None
  failed = re.search(r'^(?:FAILED|ERROR) \S+?/(test_\w+\.py)(?:::(\S+))?',
                     done.stdout, re.M)  # fmt: skip
  if not failed or not failed[2]:
    raise RuntimeError(done.stdout + done.stderr)  # broken, not caught
  return f'`{failed[1]}::{failed[2]}`'


def main(names: list[str]) -> int:
  """Plants every fault (or those named) and prints the table."""
  survived = 0
  print('| planted fault | in | caught by |\n| --- | --- | --- |', flush=True)
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    ignore = shutil.ignore_patterns('__pycache__')
    for part in ('sr_optax', 'tests/sr_optax'):
      shutil.copytree(ROOT / part, folder / part, ignore=ignore)
    shutil.copy(ROOT / 'pyproject.toml', folder)
    for fault in FAULTS:
      if names and fault.name not in names:
        continue
      path = folder / 'sr_optax' / fault.file
      text = path.read_text()
      assert text.count(fault.old) == 1, fault
      path.write_text(text.replace(fault.old, fault.new))
      test = run(folder, fault.tests)
      path.write_text(text)
      survived += test is None
      row = f'| {fault.name} | `{fault.file}` | {test or "**survived**"} |'
      print(row, flush=True)
  return 1 if survived else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
