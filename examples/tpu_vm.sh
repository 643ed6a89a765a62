#!/usr/bin/env bash
# Post-trains on a TPU VM slice: the same command on every host. JAX finds the
# hosts by itself. The run folder must be on a file system that all hosts see,
# such as a mounted Filestore share or bucket.
set -euo pipefail
: "${TPU:?name of the slice}" "${ZONE:?zone}" "${MODEL:?path of the model on every host}"
: "${OUT:?run folder that all hosts see}"

on_all_hosts() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm scp --recurse . "$TPU":sr-optax --zone="$ZONE" --worker=all
on_all_hosts "cd sr-optax && make .venv/.ready && .venv/bin/pip install 'jax[tpu]'"
on_all_hosts "cd sr-optax && .venv/bin/python -m train --distributed \
  --out $OUT --model $MODEL --task reasoning_gym:chain_sum \
  --mesh fsdp=-1 --prompts 64 --group 8 --max-new-tokens 256 --lr 1e-6"
