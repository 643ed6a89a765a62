"""`residual16` is the FP32 shadow in half the bytes, bit for bit."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sr_optax

BF16 = jnp.bfloat16
INF = float('inf')


def code(q):
  return np.asarray(q).view(np.uint16)


def link_of(shadow, seed, refresh):
  return sr_optax.stochastic_rounding(
    jax.random.key(seed), shadow=shadow, refresh_every=refresh
  )


def adamw(link):
  return sr_optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1), link
  )


def weights(mesh=None):
  rng = np.random.default_rng(0)
  params = {
    'w': (rng.standard_normal((16, 61)) * 0.02).astype(BF16),
    'b': np.zeros(8, BF16),
    'one': np.ones(8, BF16),
  }
  params['w'][:8, :7] *= 2.0**-40  # crosses zero and many binades on its way
  if mesh is None:
    return jax.tree.map(jnp.asarray, params)
  return jax.device_put(params, NamedSharding(mesh, P('x')))


def train(tx, params, state, first, steps):
  """AdamW steps; returns the state and digests of weights at every step."""

  @jax.jit
  def run(params, state):
    def body(carry, i):
      params, state = carry
      grads = jax.tree.map(
        lambda p: jnp.sin(
          jnp.arange(p.size, dtype=jnp.float32).reshape(p.shape) * (i + 1.0)
        ),
        params,
      )
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), params

    steps_of = jnp.arange(first, first + steps, dtype=jnp.float32)
    return jax.lax.scan(body, (params, state), steps_of)

  (params, state), trace = run(params, state)
  shadow = jax.jit(sr_optax.shadow_params)(state, params)
  return params, state, jax.device_get((trace, shadow))


def save_and_load(tree, shardings=None):
  """Through bytes: what every checkpoint format does to a state."""
  leaves, treedef = jax.tree.flatten(tree)
  data = pickle.loads(pickle.dumps([np.asarray(x) for x in leaves]))
  return jax.device_put(treedef.unflatten(data), shardings)


@pytest.mark.parametrize('devices', [1, 8])
@pytest.mark.parametrize('refresh', [1, 7, INF])
def test_a_thousand_adamw_steps_equal_the_fp32_shadow_bit_for_bit(
  refresh, devices
):
  mesh = None
  if devices == 8:
    mesh = jax.make_mesh(
      (8,), ('x',), (jax.sharding.AxisType.Auto,), devices=jax.devices('cpu')
    )
  results = {}
  for shadow in ('float32', 'residual16'):
    params = weights(mesh)
    tx = adamw(link_of(shadow, 1, refresh))
    params, state, first = train(tx, params, tx.init(params), 0, 500)
    # Restored into a link with another key and another rhythm: what made the
    # present weights is in the state.
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    params, state = save_and_load((params, state), shardings)
    tx = adamw(link_of(shadow, 2, {1: INF, 7: 1, INF: 3}[refresh]))
    restored = jax.device_get(jax.jit(sr_optax.shadow_params)(state, params))
    jax.tree.map(np.testing.assert_array_equal, restored, first[1])
    *_, second = train(tx, params, state, 500, 500)
    results[shadow] = first, second

  def equal(a, b):
    view = np.uint16 if a.dtype == BF16 else np.uint32
    np.testing.assert_array_equal(a.view(view), b.view(view))

  jax.tree.map(equal, results['float32'], results['residual16'])
  trace = results['float32'][1][0]['w']
  assert (code(trace[0]) != code(trace[-1])).mean() > 0.9  # it trained


def test_every_upper_half_is_reconstructed_from_its_rounding():
  # All finite upper halves, 9 lower halves each, with a fresh draw.
  rng = np.random.default_rng(1)
  low = np.concatenate(
    [[0, 1, 0x7FFF, 0x8000, 0xFFFF], rng.integers(0, 2**16, 4)]
  ).astype(np.uint32)
  high = np.arange(2**16, dtype=np.uint32)
  high = high[(high & 0x7FFF) < 0x7F7F]
  shadow = (high[:, None] << 16 | low).view(np.float32)
  tx = link_of('residual16', 3, 1)
  params, state = jax.jit(lambda s: sr_optax.init_from_shadow(tx, s))(shadow)
  again = jax.jit(sr_optax.shadow_params)(state, params)
  np.testing.assert_array_equal(
    np.asarray(again).view(np.uint32), shadow.view(np.uint32)
  )
  assert (code(params) != (shadow.view(np.uint32) >> 16)).mean() > 0.3


@pytest.mark.parametrize('refresh', [1, INF])
def test_a_shadow_that_crosses_zero_is_reconstructed(refresh):
  # Small shadows of both signs, their rounding is often a zero of either sign.
  # optax.apply_updates may write +0 for -0: the sign of the shadow is the one
  # bit at stake, so the exact apply_updates must keep it.
  tx = {s: link_of(s, 4, refresh) for s in ('float32', 'residual16')}
  n = 1009
  rng = np.random.default_rng(2)
  params = jnp.zeros((n,), BF16)
  runs = {s: (params, t.init(params)) for s, t in tx.items()}
  step = {
    s: jax.jit(lambda p, st, u, t=t: t.update(u, st, p)) for s, t in tx.items()
  }
  for _ in range(30):
    u = jnp.asarray(
      rng.standard_normal(n) * 2.0 ** rng.integers(-100, -1, n), jnp.float32
    )
    for s, (p, state) in runs.items():
      updates, state = step[s](p, state, u)
      runs[s] = optax.apply_updates(p, updates), state
  a, b = (np.asarray(sr_optax.shadow_params(st, p)) for p, st in runs.values())
  np.testing.assert_array_equal(a, b)


def test_zeros_set_from_outside_become_no_nan():
  # Without the rule for zeros, 0 - carry wraps to 0xffff....: a NaN.
  tx = link_of('residual16', 5, 1)
  shadow = np.full(1009, 1 + 2.0**-8 + 2.0**-20, np.float32)
  params, state = sr_optax.init_from_shadow(tx, shadow)
  for zero in (0.0, -0.0):
    new = jnp.full((1009,), zero, BF16)
    got = np.asarray(sr_optax.shadow_params(state, new))
    # Within one step of zero: the lower half of the word at most.
    assert (got.view(np.uint32) & 0x7FFFFFFF < 0x10000).all()
    updates, after = jax.jit(tx.update)(jnp.zeros(1009), state, new)
    assert np.isfinite(sr_optax.shadow_params(after, new)).all()
    assert (np.abs(optax.apply_updates(new, updates)) < 1e-30).all()


def test_replacements_without_resync_end_within_one_step():
  tx = link_of('residual16', 6, 1)
  rng = np.random.default_rng(3)
  shadow = (rng.standard_normal(10_007) * 0.02).astype(np.float32)
  params, state = sr_optax.init_from_shadow(tx, shadow)
  new = jnp.asarray(rng.standard_normal(10_007) * 3, BF16)
  got = np.asarray(sr_optax.shadow_params(state, new)).astype(float)
  target = np.asarray(new).astype(float)
  step = 2.0 ** (np.frexp(np.abs(target))[1] - 8)
  error = (got - target) / step
  assert (np.abs(error) < 1).all()
  # Mean zero: uniform lower half and uniform carry, variance 1/6 of a step.
  assert abs(error.mean()) < 5 * (1 / 6 / 10_007) ** 0.5


def test_the_shadow_takes_two_bytes_a_weight():
  params = {'w': jnp.ones((13, 17), BF16), 'norm': jnp.ones((5,), jnp.float32)}
  state = link_of('residual16', 7, 1).init(params)
  leaves = jax.tree.leaves(state.shadow)
  assert [x.dtype.name for x in leaves] == ['uint16']
  assert leaves[0].nbytes == 2 * 13 * 17
