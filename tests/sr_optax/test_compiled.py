"""What the compiled programs cost: bytes, buffers, operations. No times."""

import jax
import jax.numpy as jnp
import optax
import pytest

import sr_optax

BF16 = jnp.bfloat16
N = 4096 * 4099  # nothing is allocated: programs are compiled, not run
SHAPE = (4096, 4099)


def compiled_step(link, donate=True):
  tx = sr_optax.chain(optax.adamw(1e-6), link)
  params = {'w': jax.ShapeDtypeStruct(SHAPE, BF16)}

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(step, donate_argnums=(0, 1) if donate else ())
  return step.lower(params, jax.eval_shape(tx.init, params), params).compile()


def stochastic(**kwargs):
  return sr_optax.stochastic_rounding(jax.random.key(0), **kwargs)


@pytest.mark.parametrize(
  'shadow, refresh', [('float32', 1), ('float32', float('inf')), (None, 1)]
)
def test_a_step_needs_no_buffer_of_noise(shadow, refresh):
  compiled = compiled_step(stochastic(shadow=shadow, refresh_every=refresh))
  assert compiled.memory_analysis().temp_size_in_bytes <= 1 * N


def test_residual16_needs_no_more_than_a_copy_of_what_it_rewrites():
  # Weight and residual are each made from both old ones, in two loops on a CPU
  # (XLA fuses no loops of several outputs there): a copy of each, 4 bytes, and
  # the Adam direction that both loops read, 4 bytes. Still no noise.
  compiled = compiled_step(stochastic(shadow='residual16'))
  assert compiled.memory_analysis().temp_size_in_bytes <= 8 * N + 2**16


def test_a_donated_state_is_updated_in_place():
  # 2 weight + 4 shadow + 8 moments, each byte of them reused.
  memory = compiled_step(stochastic()).memory_analysis()
  assert memory.alias_size_in_bytes >= 14 * N


def test_stochastic_rounding_moves_the_bytes_of_nearest_rounding():
  cost = {
    name: compiled_step(link).cost_analysis()['bytes accessed']
    for name, link in (
      ('sr', stochastic()),
      ('sticky', stochastic(refresh_every=float('inf'))),
      ('rn', sr_optax.nearest_rounding()),
    )
  }
  assert cost['sr'] <= 1.01 * cost['rn']
  assert cost['sticky'] <= 1.01 * cost['rn']


def test_rounding_an_array_reads_four_bytes_and_writes_two():
  compiled = (
    jax.jit(sr_optax.stochastic_round)
    .lower(jax.random.key(0), jax.ShapeDtypeStruct(SHAPE, jnp.float32))
    .compile()
  )
  assert compiled.cost_analysis()['bytes accessed'] <= 6 * 1.01 * N
  assert compiled.memory_analysis().temp_size_in_bytes < 4096


def test_rounding_uses_no_floating_point_operation():
  # By integers only: nothing that XLA may elide or flush.
  jaxpr = jax.make_jaxpr(
    lambda x: sr_optax.stochastic_round(jax.random.key(0), x)
  )(jax.ShapeDtypeStruct((7,), jnp.float32))
  allowed = {'bitcast_convert_type'}

  def check(jaxpr):
    for eqn in jaxpr.eqns:
      inner = [
        p.jaxpr if hasattr(p, 'jaxpr') else p
        for p in eqn.params.values()
        if hasattr(p, 'eqns') or hasattr(p, 'jaxpr')
      ]
      for sub in inner:
        check(sub)
      floats = any(
        jnp.issubdtype(v.aval.dtype, jnp.floating)
        for v in (*eqn.invars, *eqn.outvars)
      )
      if floats and not inner:
        assert eqn.primitive.name in allowed, eqn

  check(jaxpr.jaxpr)
