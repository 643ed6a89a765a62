"""Where arrays live: the mesh, and the rules from paths to its axes.

A mesh has three axes. Prompts and completions are spread over `data` and
`fsdp`, heads, feed-forward width and vocabulary over `tensor`; weights, shadow
and moments over `fsdp` and `tensor`. Everything runs under `jax.jit`, which
inserts the communication (Auto axes).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ('data', 'fsdp', 'tensor')
ROWS = ('data', 'fsdp')  # what rows of a batch are spread over

# Every parameter by path; leaves of the optimizer's state follow the parameter
# whose path theirs ends with. The norms are too small to be worth cutting.
RULES = {
  'embed': P('tensor', 'fsdp'),
  'blocks/attention_norm': P(None, None),
  'blocks/q': P(None, 'fsdp', 'tensor', None),
  'blocks/k': P(None, 'fsdp', 'tensor', None),
  'blocks/v': P(None, 'fsdp', 'tensor', None),
  'blocks/o': P(None, 'tensor', None, 'fsdp'),
  'blocks/q_bias': P(None, 'tensor', None),
  'blocks/k_bias': P(None, 'tensor', None),
  'blocks/v_bias': P(None, 'tensor', None),
  'blocks/q_norm': P(None, None),
  'blocks/k_norm': P(None, None),
  'blocks/mlp_norm': P(None, None),
  'blocks/gate': P(None, 'fsdp', 'tensor'),
  'blocks/up': P(None, 'fsdp', 'tensor'),
  'blocks/down': P(None, 'tensor', 'fsdp'),
  'norm': P(None),
  'head': P('fsdp', 'tensor'),
}


class MeshError(ValueError):
  """A mesh that does not exist or does not fit; the message is for the user."""


def parse_mesh(text: str) -> dict[str, int]:
  """Reads `data=1,fsdp=-1,tensor=1`; axes that are left out have size 1.

  Returns:
    The size of every axis; at most one is -1, all the rest of the devices.

  Raises:
    MeshError: an unknown or repeated axis, or a size that is none.
  """
  sizes = {}
  for part in filter(None, text.split(',')):
    name, _, size = (word.strip() for word in part.partition('='))
    if name not in AXES or name in sizes:
      problem = 'is there twice' if name in sizes else 'does not exist'
      raise MeshError(
        f'mesh {text!r}: the axis {name!r} {problem}; there are: '
        + ', '.join(AXES)
      )
    try:
      sizes[name] = int(size)
    except ValueError:
      sizes[name] = 0
    if sizes[name] < 1 and sizes[name] != -1:
      raise MeshError(
        f'mesh {text!r}: expected {name}=N with N >= 1, or -1 for the rest of '
        'the devices'
      )
  if list(sizes.values()).count(-1) > 1:
    raise MeshError(f'mesh {text!r}: only one axis can be -1')
  return {axis: sizes.get(axis, 1) for axis in AXES}


def make_mesh(text: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh over all devices of all processes.

  Args:
    text: see `parse_mesh`.
    devices: default: `jax.devices()`. Neighbours of the `tensor` axis are
      neighbours there, where JAX does not know better.

  Raises:
    MeshError: if the axes do not multiply to the number of devices.
  """
  devices = all_devices() if devices is None else devices
  sizes = parse_mesh(text)
  given = math.prod(size for size in sizes.values() if size > 0)
  sizes = {k: len(devices) // given if n < 0 else n for k, n in sizes.items()}
  if math.prod(sizes.values()) != len(devices):
    raise MeshError(
      f'mesh {text!r} does not multiply to the {len(devices)} devices that '
      'there are'
    )
  return jax.make_mesh(
    tuple(sizes.values()), AXES, (AxisType.Auto,) * 3, devices=devices
  )


def all_devices() -> Sequence[jax.Device]:
  """The devices that a run uses."""
  return jax.devices()


def row_shards(mesh: Mesh) -> int:
  """Parts that rows of a batch are spread over; 1 on an empty mesh."""
  return math.prod(mesh.shape.get(axis, 1) for axis in ROWS)


def copies(prompts: int, group: int, mesh: Mesh) -> int:
  """How often each prompt has to be there for its rows to be spread evenly.

  1 where the prompts divide. Else a group is cut over several devices and each
  of them computes the prompt's keys and values for itself: prefill, and the
  prompts' part of a training step, cost as with `copies` times the prompts.

  Args:
    prompts: of a micro-batch.
    group: completions per prompt.
    mesh: of the run.

  Raises:
    MeshError: if not even the completions divide.
  """
  shards = row_shards(mesh)
  times = shards // math.gcd(prompts, shards)
  if group % times:
    raise MeshError(
      f'{prompts} prompts x {group} completions cannot be spread evenly over '
      f'data x fsdp = {shards} devices: their product must be divisible, and '
      f'the {group} completions of a prompt by {times}'
    )
  return times


def partition(path: str) -> P:
  """The rule for a parameter, or for a leaf of the state that follows it.

  Raises:
    MeshError: if there is none.
  """
  path = path.removesuffix('/value')
  matching = [n for n in RULES if path == n or path.endswith(f'/{n}')]
  if not matching:
    raise MeshError(f'no sharding rule for the parameter {path!r}')
  return RULES[max(matching, key=len)]


def shardings(tree: Any, mesh: Mesh) -> Any:
  """The sharding of every leaf of parameters or of a training state.

  Scalars and PRNG keys (`uint32[2]`) are replicated.

  Args:
    tree: of arrays or of their shapes.
    mesh: of the run.

  Returns:
    The same tree of `NamedSharding`.

  Raises:
    MeshError: for a leaf without a rule, or one that its axes do not divide.
  """

  def of(path, leaf):
    if leaf.ndim == 0 or (leaf.shape == (2,) and leaf.dtype == np.uint32):
      return NamedSharding(mesh, P())
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    spec = partition(name)
    if len(spec) != leaf.ndim:
      raise MeshError(
        f'the sharding rule {spec} does not fit {name!r} of shape {leaf.shape}'
      )
    for size, axis in zip(leaf.shape, spec, strict=True):
      if axis is not None and size % mesh.shape[axis]:
        raise MeshError(
          f'the parameter {name.removesuffix("/value")!r} of shape '
          f'{leaf.shape}: {size} is not divisible by {axis}={mesh.shape[axis]}'
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(of, tree)


def check_heads(heads: int, kv_heads: int, mesh: Mesh) -> None:
  """Refuses a `tensor` axis that does not divide the heads.

  Raises:
    MeshError: with both numbers.
  """
  parts = mesh.shape['tensor']
  for name, count in (('heads', heads), ('key/value heads', kv_heads)):
    if count % parts:
      raise MeshError(
        f'the {count} {name} of the model are not divisible by tensor={parts}'
      )


def rows(mesh: Mesh) -> NamedSharding:
  """The sharding of an array whose first axis are rows of a batch."""
  return NamedSharding(mesh, P(ROWS))


def place(
  shape: tuple[int, ...],
  sharding: NamedSharding,
  read: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
  """A sharded array of which a process makes only what its devices hold.

  Args:
    shape: of the whole.
    sharding: of the result.
    read: makes the part that a tuple of slices describes.
  """
  return jax.make_array_from_callback(shape, sharding, read)


def constrain(x: jax.Array, *axes) -> jax.Array:
  """Fixes the sharding of a value under `jit`; without a mesh, nothing."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, P(*axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(weight: jax.Array, path: str) -> jax.Array:
  """A weight gathered over `fsdp`, to be used; its gradient is cut again.

  Args:
    weight: a parameter, or one layer of a stacked one.
    path: of the parameter.
  """
  return constrain(weight, *_axes(weight, path, whole=True))


def _gathered_forward(weight, path):
  return gathered(weight, path), None


def _gathered_backward(path, _, cotangent):
  # Summed where the weight was used, then cut: a reduce-scatter. At once, the
  # compiler would rather move activations.
  cotangent = constrain(cotangent, *_axes(cotangent, path, whole=True))
  return (constrain(cotangent, *_axes(cotangent, path, whole=False)),)


gathered.defvjp(_gathered_forward, _gathered_backward)


def spread(weight: jax.Array, path: str) -> jax.Array:
  """A gathered weight once for every row shard, `[shards, ...]`.

  For use in a loop: its gradient adds up on every device by itself and is
  summed over them once, after the loop, rather than in every turn.
  """
  count = row_shards(jax.sharding.get_abstract_mesh())
  axes = _axes(weight, path, whole=True)
  weights = jax.numpy.broadcast_to(weight[None], (count, *weight.shape))
  return constrain(weights, ROWS, *axes)


def _axes(weight, path, *, whole):
  axes = tuple(partition(path))[-weight.ndim :]
  return [None if whole and axis == 'fsdp' else axis for axis in axes]
