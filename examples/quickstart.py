"""BF16 weights that learn at small steps, in one link of an optax chain.

    python examples/quickstart.py --out quickstart.png

A regression is fine-tuned with Adam at a learning rate of 1e-6. Its weights,
about 0.02 in size, start on the BF16 grid, whose values are 1.2e-4 apart there.
Rounded to nearest, a weight needs some 60 steps in one direction before its
BF16 copy moves at all; rounded stochastically, the weights follow their FP32
shadow from the first step, as many as it takes on average.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib
import optax

import sr_optax

matplotlib.use('Agg')  # write the picture without a display
import matplotlib.pyplot as plt

RATE = 1e-6
KEY = jax.random.key(0)
ARMS = {
  'FP32': None,
  'BF16, stochastic': sr_optax.stochastic_rounding(KEY),
  'BF16, nearest, FP32 shadow': sr_optax.nearest_rounding(),
  'BF16, nearest, no shadow': sr_optax.nearest_rounding(shadow=None),
}


def make_problem(inputs=4096, outputs=16, rank=8, samples=256):
  """Start weights on the BF16 grid, features [N, I] and targets [N, O]."""
  keys = jax.random.split(jax.random.key(1), 4)
  factors = jax.random.normal(keys[0], (rank, inputs))  # features of low rank
  x = jax.random.normal(keys[1], (samples, rank)) @ factors  # [N, I]
  start = 0.02 * jax.random.normal(keys[2], (inputs, outputs), jnp.bfloat16)
  # The right weights lie about 5e-5 from the start: less than half a step.
  shift = factors.T @ jax.random.normal(keys[3], (rank, outputs))
  y = x @ (start + 5e-5 * shift / jnp.std(shift))  # [N, O]
  return {'w': start}, x, y


def train(link, params, x, y, steps):
  """Runs Adam; returns the loss before each step, relative to the first."""
  if link is None:
    tx = optax.adam(RATE)
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
  else:
    tx = sr_optax.chain(optax.adam(RATE), link)

  def loss(params):  # in FP32: what differs is the weights alone
    return jnp.mean((x @ params['w'].astype(jnp.float32) - y) ** 2)

  def step(carry, _):
    params, state = carry
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), value

  _, losses = jax.lax.scan(step, (params, tx.init(params)), length=steps)
  return losses / losses[0]


def main(arguments=None):
  """Trains all arms, prints a table, draws the picture; returns the losses."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=120)
  parser.add_argument('--out', default='quickstart.png')
  options = parser.parse_args(arguments)
  params, x, y = make_problem()
  run = jax.jit(train, static_argnums=(0, 4))
  losses = {
    name: run(link, params, x, y, options.steps) for name, link in ARMS.items()
  }
  for name, curve in losses.items():
    print(f'{name:28} loss after {options.steps} steps: {curve[-1]:7.2%}')

  figure, axes = plt.subplots(figsize=(6.4, 4), layout='constrained')
  styles = ['k-', 'C0--', 'C1-', 'C3-']
  for (name, curve), style in zip(losses.items(), styles, strict=True):
    axes.plot(100 * curve, style, label=name, linewidth=2)
  axes.set(
    xlabel=f'optimizer steps (Adam, learning rate {RATE:g})',
    ylabel='loss (% of the start)',
    ylim=(0, 105),
    xlim=(0, options.steps - 1),
  )
  axes.grid(alpha=0.3)
  axes.legend(frameon=False)
  figure.savefig(options.out, dpi=150)
  return losses


if __name__ == '__main__':
  main()
