"""What a compiled program computes, reads and moves, read from its text.

XLA's own cost analysis counts the body of a loop once, however often it runs.
Here everything inside a loop counts as often as the loop turns.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'all-to-all',
  'collective-broadcast',
  'collective-permute',
  'ragged-all-to-all',
  'reduce-scatter',
)
_BITS = {
  'pred': 8,
  **{f'{kind}{bits}': bits for kind in 'su' for bits in (2, 4, 8, 16, 32, 64)},
  **{f'f{bits}': bits for bits in (16, 32, 64)},
  **{'bf16': 16, 'c64': 64, 'c128': 128},
}
_ARRAY = re.compile(r'(\w+)\[([\d,<=]*)\](?:\{([^{}]*)\})?')
_HEAD = re.compile(r'\s*(ROOT )?%?([\w.\-]+) = ')
_NAME = re.compile(r'%([\w.\-]+)')
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_CALLED = re.compile(r'\b(?:calls|body|condition|to_apply)=%?([\w.\-]+)')
_CHANNEL = re.compile(r'\bchannel_id=(\d+)')
_BRANCHES = re.compile(
  r'\b(?:branch_computations=\{([^}]*)\}'
  r'|(?:true|false)_computation=(%?[\w.\-]+))'
)
# Run the computations that they name; others name scalar functions.
_CALLERS = ('async-start', 'call', 'conditional', 'fusion', 'while')
# Neither read nor write memory themselves.
_FREE = (
  'add-dependency',
  'after-all',
  'async-done',
  'async-update',
  'bitcast',
  'constant',
  'copy-done',
  'get-tuple-element',
  'opt-barrier',
  'parameter',
  'partition-id',
  'replica-id',
  'tuple',
  *_CALLERS,
)


class Array(NamedTuple):
  """An array on one device."""

  dtype: str
  shape: tuple[int, ...]
  on_chip: bool  # in the memory of the core, not of the device

  @property
  def bytes(self) -> int:
    """Without padding; 0 for tokens and other types without size."""
    return math.prod(self.shape) * _BITS.get(self.dtype, 8) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation."""

  name: str
  opcode: str
  arrays: tuple[Array, ...]  # of the result, tuples flattened
  operands: tuple[str, ...]
  attributes: str
  root: bool

  def called(self) -> list[str]:
    """The computations that run when this one does."""
    if self.opcode not in _CALLERS:
      return []
    names = _CALLED.findall(self.attributes)
    for many, one in _BRANCHES.findall(self.attributes):
      names += (part.strip().lstrip('%') for part in (many or one).split(','))
    return names

  @property
  def trips(self) -> int | None:
    """How often a loop turns; None if the compiler does not know."""
    found = _TRIPS.search(self.attributes)
    return int(found[1]) if found else None


Computation = dict[str, Instruction]


class Moved(NamedTuple):
  """Collectives of one kind on one device."""

  count: int
  bytes: int  # of the operands or of the results, whichever are more


class Costs(NamedTuple):
  """Of one run of a program on one device."""

  flops: int  # of matrix products: 2 per multiplication
  bytes: int  # read and written, estimated by `_traffic`
  collectives: dict[str, Moved]
  open_loops: int  # whose turns the compiler does not know


class Module:
  """A program for one device, from `compiled.as_text()`."""

  def __init__(self, text: str):
    """Reads the text.

    Raises:
      ValueError: if it holds no program.
    """
    self.computations: dict[str, Computation] = {}
    self.entry = ''
    current: Computation | None = None
    for line in text.splitlines():
      if line.endswith('{') and not line.startswith((' ', 'HloModule')):
        name = line.removeprefix('ENTRY ').split()[0].lstrip('%')
        current = self.computations.setdefault(name, {})
        if line.startswith('ENTRY '):
          self.entry = name
      elif current is not None and (head := _HEAD.match(line)):
        instruction = _instruction(head, line)
        current[instruction.name] = instruction
    if not self.entry:
      raise ValueError('expected the text of a compiled program')

  def arrays(self) -> Iterator[Array]:
    """Every array outside of fusions: what may get a buffer."""
    for instruction, computation, body, _ in self._walk(1):
      if computation is body:
        yield from instruction.arrays

  def costs(self, open_trips: int = 1) -> Costs:
    """Adds everything up.

    Args:
      open_trips: turns of a loop where the compiler does not know them.
    """
    flops = traffic = 0
    moved = collections.defaultdict(lambda: [0, 0])
    open_loops, spread = set(), set()
    for instruction, computation, body, times in self._walk(open_trips):
      flops += times * _flops(instruction, computation)
      if instruction.opcode == 'while' and self._trips(instruction) is None:
        open_loops.add(instruction.name)
      kind = instruction.opcode.removesuffix('-start')
      if kind in COLLECTIVES:
        if computation is not body:
          # A TPU spreads one collective over several fusions of a body.
          part = (id(body), *_identity(instruction))
          if part in spread:
            continue
          spread.add(part)
          if _cut(instruction, computation):
            kind = 'reduce-scatter'
        moved[kind][0] += times
        moved[kind][1] += times * _moved(instruction, computation)
      if computation is body:
        traffic += times * self._traffic(instruction, computation)
    collectives = {kind: Moved(*moved[kind]) for kind in sorted(moved)}
    return Costs(flops, traffic, collectives, len(open_loops))

  def _trips(self, loop: Instruction) -> int | None:
    """Turns of a loop: as the compiler says, or the bound that is compared.

    TPU programs do not say; their counters start at 0.
    """
    if loop.trips is not None:
      return loop.trips
    condition = re.search(r'\bcondition=%?([\w.\-]+)', loop.attributes)[1]
    bounds, opcodes, todo = [], set(), [condition]
    while todo:
      for one in self.computations[todo.pop()].values():
        todo += one.called()
        opcodes.add(one.opcode)
        if one.opcode == 'constant' and one.arrays[0][:2] == ('s32', ()):
          bounds.append(int(one.attributes.split()[0].rstrip(',')))
    return bounds[0] if len(bounds) == 1 and 'and' not in opcodes else None

  def _walk(
    self, open_trips: int
  ) -> Iterator[tuple[Instruction, Computation, Computation, int]]:
    """What runs, where, the same outside of fusions, and how often."""

    def visit(name, times, body=None):
      computation = self.computations[name]
      body = computation if body is None else body
      for instruction in computation.values():
        yield instruction, computation, body, times
        turns = times
        if instruction.opcode == 'while':
          known = self._trips(instruction)
          turns *= open_trips if known is None else known
        fused = computation is not body or instruction.opcode == 'fusion'
        for called in instruction.called():
          yield from visit(called, turns, body if fused else None)

    return visit(self.entry, 1)

  def _traffic(self, instruction: Instruction, computation: Computation) -> int:
    """Bytes that an instruction reads and writes in the device's memory.

    Operands and result; of what is only sliced, or updated in place, the slice.
    """
    if instruction.opcode == 'fusion':
      return self._fusion_traffic(instruction, computation)
    if instruction.opcode in _FREE or instruction.opcode.endswith('-done'):
      return 0
    operands = [_result(name, computation) for name in instruction.operands]
    arrays = instruction.arrays
    match instruction.opcode:
      case 'dynamic-slice' | 'slice' | 'gather' | 'copy-start':
        return _copied(arrays[0], operands[0][0], arrays[0])
      case 'dynamic-slice-start' | 'slice-start':
        part = arrays[len(operands)]  # behind the operands
        return _copied(part, operands[0][0], part)
      case 'dynamic-update-slice':
        update = operands[1][0]
        return _copied(update, update, arrays[0])
      case 'scatter':  # reads what it adds to
        update = operands[-1][0]
        return _copied(update, update, arrays[0], arrays[0])
    if instruction.opcode.endswith('-start'):  # its tuple lists the operands
      arrays = arrays[len(operands) :][: len(operands)]
    return _bytes(arrays) + sum(map(_bytes, operands))

  def _fusion_traffic(
    self, fusion: Instruction, computation: Computation
  ) -> int:
    operands = [_result(name, computation) for name in fusion.operands]
    read = sum(
      min(_bytes(arrays), self._read(fusion, number))
      for number, arrays in enumerate(operands)
    )
    return read + min(_bytes(fusion.arrays), self._written(fusion))

  def _read(self, fusion: Instruction, number: int) -> float:
    """Bytes that a fusion needs of an operand; infinite: of all of it."""
    inside = self.computations[fusion.called()[0]]

    def needed(name):
      if inside[name].root:
        return math.inf
      total = 0
      for user in inside.values():
        for place, operand in enumerate(user.operands):
          if operand == name:
            total += by(user, place)
      return total

    def by(user, place):
      match user.opcode:
        case 'bitcast':
          return needed(user.name)
        case 'dynamic-slice' | 'slice' | 'gather' if not place:
          return sum(array.bytes for array in user.arrays)
        case 'dynamic-update-slice' if not place:
          return 0  # in place
        case 'fusion':
          inner = self.computations[user.called()[0]].values()
          if all(one.opcode in ('bitcast', 'parameter') for one in inner):
            return needed(user.name)
          return self._read(user, place)
      return math.inf

    names = [
      one.name
      for one in inside.values()
      if one.opcode == 'parameter' and int(one.attributes.split()[0]) == number
    ]
    return sum(map(needed, names))

  def _written(self, fusion: Instruction) -> int:
    """Bytes that a fusion writes; of an update in place, the update."""
    inside = self.computations[fusion.called()[0]]

    def of(name):
      one = inside[name]
      match one.opcode:
        case 'bitcast' | 'tuple':
          return sum(map(of, one.operands))
        case 'dynamic-update-slice':
          return sum(a.bytes for a in _result(one.operands[1], inside))
        case 'fusion':
          return self._written(one)
      return sum(array.bytes for array in one.arrays)

    return sum(of(one.name) for one in inside.values() if one.root)


def _instruction(head: re.Match, line: str) -> Instruction:
  rest = line[head.end() :]
  end = _closing(rest) if rest.startswith('(') else rest.index(' ')
  kind, rest = rest[:end], rest[end:].lstrip()
  opcode, rest = rest.split('(', 1)
  end = _closing('(' + rest) - 1
  arrays = tuple(
    Array(
      dtype,
      tuple(int(size.lstrip('<=')) for size in shape.split(',') if size),
      bool(re.search(r'S\([1-9]', layout)),
    )
    for dtype, shape, layout in _ARRAY.findall(kind)
  )
  return Instruction(
    head[2],
    opcode,
    arrays,
    tuple(_NAME.findall(rest[: end - 1])),
    # A parameter's number and a constant stand where operands do.
    f'{rest[: end - 1]} {rest[end:]}'
    if opcode in ('parameter', 'constant')
    else rest[end:],
    bool(head[1]),
  )


def _closing(text: str) -> int:
  """Behind the bracket that closes the first one."""
  depth = 0
  for place, letter in enumerate(text):
    depth += (letter == '(') - (letter == ')')
    if not depth:
      return place + 1
  raise ValueError(f'brackets do not match: {text[:80]!r}')


def _result(name: str, computation: Computation) -> tuple[Array, ...]:
  return computation[name].arrays


def _bytes(arrays: Iterable[Array]) -> int:
  return sum(array.bytes for array in arrays if not array.on_chip)


def _copied(part: Array, *places: Array) -> int:
  """Bytes of a part that moves from or to places; on the chip they are free."""
  return sum(part.bytes for place in places if not place.on_chip)


def _identity(collective: Instruction) -> tuple:
  """What the parts of a spread collective have in common."""
  channel = _CHANNEL.search(collective.attributes)
  shapes = tuple(array[:2] for array in collective.arrays)
  return collective.opcode, channel and channel[1], shapes


def _cut(reduction: Instruction, computation: Computation) -> bool:
  """Whether a TPU runs an all-reduce in a fusion as a reduce-scatter."""
  return reduction.opcode == 'all-reduce' and any(
    one.opcode == 'dynamic-slice' for one in computation.values()
  )


def _moved(instruction: Instruction, computation: Computation) -> int:
  operands = [
    array
    for name in instruction.operands
    for array in _result(name, computation)
  ]
  results = list(instruction.arrays)
  if instruction.opcode in ('all-gather-start', 'collective-permute-start'):
    results = results[len(operands) :][: len(operands)]
  return max(sum(a.bytes for a in arrays) for arrays in (operands, results))


def _flops(instruction: Instruction, computation: Computation) -> int:
  """Of a matrix product; 0 for everything else."""
  if instruction.opcode not in ('dot', 'convolution'):
    return 0
  (out,) = instruction.arrays
  left, right = (
    _result(name, computation)[0].shape for name in instruction.operands[:2]
  )
  if instruction.opcode == 'dot':
    axes = re.search(
      r'lhs_contracting_dims=\{([\d,]*)\}', instruction.attributes
    )
    contracted = [left[int(axis)] for axis in axes[1].split(',') if axis]
    return 2 * math.prod(out.shape) * math.prod(contracted)
  return _convolution_flops(instruction.attributes, left, right, out.shape)


def _convolution_flops(
  attributes: str, left: tuple, right: tuple, out: tuple
) -> int:
  """Of a convolution, which is what a TPU makes of matrix products.

  Batch axes of a product become windows with so much padding or dilation that
  most places fall outside; these are not computed, and do not count.
  """
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', attributes)
  left, right, out = (
    dict(zip(names, shape, strict=True))
    for names, shape in zip(labels.groups(), (left, right, out), strict=True)
  )
  groups = re.search(r'batch_group_count=(\d+)', attributes)
  total = 2 * out['b'] * out['f'] * right['i']
  window = re.search(r'\bwindow=\{([^}]*)\}', attributes)
  fields = (
    dict(field.split('=') for field in window[1].split()) if window else {}
  )
  spatial = sorted(label for label in out if label.isdigit())
  for place, label in enumerate(spatial):
    total *= _places(fields, place, left[label], right[label], out[label])
  # With batch groups each output channel sees its own share of the batch.
  assert groups is None or left['b'] % int(groups[1]) == 0
  return total


def _places(
  fields: Mapping[str, str], place: int, size: int, kernel: int, out: int
) -> int:
  """Pairs of kernel and output places along an axis that meet an input."""

  def field(name, default):
    return fields[name].split('x')[place] if name in fields else default

  low = int(field('pad', '0_0').split('_')[0])
  return _meeting(
    size,
    kernel,
    out,
    low,
    int(field('stride', 1)),
    int(field('lhs_dilate', 1)),
    int(field('rhs_dilate', 1)),
  )


@functools.cache
def _meeting(size, kernel, out, low, stride, spread, kernel_spread) -> int:
  end = (size - 1) * spread + 1
  total = 0
  for k in range(kernel):
    # 0 <= o * stride + start < end, and divisible by spread
    start = k * kernel_spread - low
    first = max(0, -(start // stride))
    last = min(out - 1, (end - 1 - start) // stride)
    if spread == 1:
      total += max(last - first + 1, 0)
    else:
      total += sum(
        (o * stride + start) % spread == 0 for o in range(first, last + 1)
      )
  return total
