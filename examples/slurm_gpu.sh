#!/usr/bin/env bash
# Post-trains on GPUs under SLURM: one process a GPU, found by JAX from SLURM's
# variables. Submit with: MODEL=... OUT=... sbatch examples/slurm_gpu.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
set -euo pipefail
: "${MODEL:?path of the model}" "${OUT:?run folder that all nodes see}"

# SIGTERM, 120 s before the time limit, saves a checkpoint; the next job resumes.
if [ -d "$OUT/checkpoints" ]; then
  exec srun .venv/bin/python -m train --distributed --resume --out "$OUT"
fi
exec srun .venv/bin/python -m train --distributed --out "$OUT" --model "$MODEL" \
  --task reasoning_gym:chain_sum --mesh data=2,fsdp=8 \
  --prompts 64 --group 8 --max-new-tokens 256 --lr 1e-6 --checkpoint-every 50
