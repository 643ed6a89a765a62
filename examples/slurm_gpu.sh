#!/usr/bin/env bash
# Post-trains on GPUs under SLURM: one process a GPU, which JAX joins by itself.
# Run in this checkout, its environment with jax[cuda12], on a shared file
# system; submit again to go on:
#
#   MODEL=/shared/model OUT=/shared/run sbatch examples/slurm_gpu.sh
#
# To change: the numbers below, --task, --mesh and the sizes; see docs/scale.md.
# Whole nodes, and no --gpus-per-task: JAX wants every process to see all GPUs
# of its node and takes the one of its number.
# https://github.com/jax-ml/jax/issues/28194
# Not run on a cluster; checked by tests/train/test_examples.py.
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --time=12:00:00
# A checkpoint before the time is up: as long as a step and saving take.
#SBATCH --signal=TERM@300
set -euo pipefail
: "${MODEL:?path of the model}" "${OUT:?run folder}"

# JAX takes three quarters of a GPU unless told otherwise.
export XLA_CLIENT_MEM_FRACTION=0.92
resume=()
if [ -f "$OUT/config.json" ]; then resume=(--resume); fi
# fsdp within a node, data between nodes.
srun .venv/bin/python -m train --distributed "${resume[@]}" --out "$OUT" \
  --model "$MODEL" --task reasoning_gym:chain_sum --mesh data=2,fsdp=8 \
  --prompts 64 --group 8 --micro-batch 16 --max-new-tokens 256 --lr 1e-6 \
  --steps 200 --checkpoint-every 50
