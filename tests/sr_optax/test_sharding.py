"""One model, one key, one result: on any mesh, in any mode of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sr_optax

BF16 = jnp.bfloat16
SHAPE = (16, 24, 5)
MESHES = {'1': (1, 1), '8': (8, 1), '2x4': (2, 4)}
SPECS = [P(), P('x'), P('x', 'y'), P('y', 'x'), P(None, ('x', 'y'))]
LAYOUTS = [
  (mesh, spec, kind)
  for mesh in MESHES
  for spec in SPECS
  for kind in (AxisType.Auto, AxisType.Explicit)
]


def mesh_of(name, kind=AxisType.Auto):
  shape = MESHES[name]
  devices = jax.devices('cpu')[: shape[0] * shape[1]]
  return jax.make_mesh(shape, ('x', 'y'), (kind, kind), devices=devices)


def code(q):
  return np.asarray(q).view(np.uint16)


def shadow():
  rng = np.random.default_rng(0)
  return rng.standard_normal(SHAPE).astype(np.float32)


@functools.cache
def on_one_device(target=BF16):
  """Rounded by the default device, outside of any mesh."""
  tree = {'w': jnp.asarray(shadow())}
  q = jax.jit(functools.partial(sr_optax.stochastic_round_tree, dtype=target))(
    jax.random.key(0), tree
  )
  return code(q['w'])


@pytest.mark.parametrize('mesh, spec, kind', LAYOUTS)
def test_rounding_does_not_depend_on_the_sharding(mesh, spec, kind):
  mesh = mesh_of(mesh, kind)
  with jax.set_mesh(mesh):
    x = jax.device_put(shadow(), NamedSharding(mesh, spec))
    q = jax.jit(sr_optax.stochastic_round_tree)(jax.random.key(0), {'w': x})
    assert q['w'].sharding.is_equivalent_to(x.sharding, 3)
    np.testing.assert_array_equal(code(q['w']), on_one_device())


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_fp16_rounding_does_not_depend_on_the_sharding(kind):
  mesh = mesh_of('2x4', kind)
  with jax.set_mesh(mesh):
    x = jax.device_put(shadow(), NamedSharding(mesh, P('x', 'y')))
    q = jax.jit(
      lambda x: sr_optax.stochastic_round_tree(
        jax.random.key(0), {'w': x}, jnp.float16
      )
    )(x)
    np.testing.assert_array_equal(code(q['w']), on_one_device(jnp.float16))


def test_eager_rounding_on_a_mesh_is_the_same():
  mesh = mesh_of('2x4')
  x = jax.device_put(shadow(), NamedSharding(mesh, P('x', 'y')))
  q = sr_optax.stochastic_round_tree(jax.random.key(0), {'w': x})
  np.testing.assert_array_equal(code(q['w']), on_one_device())


def test_rounding_inside_a_scan_on_a_mesh_is_the_same():
  mesh = mesh_of('8')
  x = jax.device_put(shadow(), NamedSharding(mesh, P('x')))

  @jax.jit
  def scan(x):
    def body(carry, sign):
      q = sr_optax.stochastic_round_tree(jax.random.key(0), {'w': carry * sign})
      return carry, q['w']

    return jax.lax.scan(body, x, jnp.array([1.0, -1.0]))[1]

  q = code(scan(x))
  np.testing.assert_array_equal(q[0], on_one_device())
  np.testing.assert_array_equal(q[1], on_one_device() ^ 0x8000)


def test_every_replica_holds_the_same_bits():
  # P('x') on 2 x 4: four replicas of each half, one buffer per device.
  mesh = mesh_of('2x4')
  x = jax.device_put(shadow(), NamedSharding(mesh, P('x')))
  tx = sr_optax.stochastic_rounding(jax.random.key(1))

  @jax.jit
  def step(p, state, u):
    updates, state = tx.update(u, state, p)
    return optax.apply_updates(p, updates), state

  p = x.astype(BF16)
  state = tx.init(p)
  for _ in range(3):
    p, state = step(p, state, x * 1e-3)
  for array in (p, state.shadow, state.last_key):
    shards = {}
    assert len(array.addressable_shards) == 8
    for shard in array.addressable_shards:
      bits = np.asarray(shard.data).tobytes()
      assert shards.setdefault(str(shard.index), bits) == bits


@pytest.mark.parametrize('stored', ['float32', 'residual16', None])
@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_a_link_fed_with_equal_updates_is_equal_on_every_mesh(stored, kind):
  tx = sr_optax.stochastic_rounding(jax.random.key(2), shadow=stored)
  rng = np.random.default_rng(3)
  updates = (rng.standard_normal((5, *SHAPE)) * 1e-3).astype(np.float32)

  @jax.jit
  def step(p, state, u):
    u, state = tx.update(u, state, p)
    p = optax.apply_updates(p, u)
    return p, state, sr_optax.shadow_params(state, p)

  def run(place):
    p = place(shadow().astype(BF16))
    state = tx.init(p)
    trace = []
    for u in updates:
      p, state, s = step(p, state, place(u))
      trace.append((code(p), np.asarray(s)))
    if stored is not None:
      assert state.shadow.sharding.is_equivalent_to(p.sharding, 3)
    assert state.last_key.sharding.is_fully_replicated
    return trace

  want = run(jnp.asarray)
  for name, spec in [('8', P('x')), ('2x4', P('x', 'y')), ('2x4', P())]:
    mesh = mesh_of(name, kind)
    with jax.set_mesh(mesh):
      sharding = NamedSharding(mesh, spec)
      got = run(lambda x, sharding=sharding: jax.device_put(x, sharding))
    jax.tree.map(np.testing.assert_array_equal, want, got)


def test_a_sharded_step_has_no_communication():
  # Noise, shadow and weights of a shard are made where the shard is.
  mesh = mesh_of('2x4')
  sharding = NamedSharding(mesh, P('x', 'y'))
  p = jax.device_put(shadow().astype(BF16), sharding)
  tx = sr_optax.stochastic_rounding(jax.random.key(4))
  state = tx.init(p)

  def step(p, state, u):
    u, state = tx.update(u, state, p)
    return optax.apply_updates(p, u), state

  u = jax.device_put(shadow(), sharding)
  text = jax.jit(step).lower(p, state, u).compile().as_text()
  for word in ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute'):
    assert word not in text


def test_inside_shard_map_the_shard_index_can_be_folded_in():
  # There the index is local: without a fold equal shards share their noise.
  mesh = mesh_of('8')
  x = jax.device_put(
    np.full((8, 101), 1 + 2.0**-8, np.float32), NamedSharding(mesh, P('x'))
  )
  key = jax.random.key(5)

  def local(x):
    return sr_optax.stochastic_round(key, x)

  def folded(x):
    k = jax.random.fold_in(key, jax.lax.axis_index('x'))
    return sr_optax.stochastic_round(k, x)

  for body, equal in ((local, True), (folded, False)):
    q = code(
      jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P('x'), out_specs=P('x'))
      )(x)
    )
    assert (q == q[:1]).all() == equal
