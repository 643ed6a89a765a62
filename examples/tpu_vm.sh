#!/usr/bin/env bash
# Post-trains on a slice of Cloud TPU VMs: the same command on every host, which
# JAX joins by itself. Run it in this checkout; it lasts as long as the command.
#
#   gcloud compute tpus tpu-vm create my-slice --zone=us-west4-a \
#     --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite
#   TPU=my-slice ZONE=us-west4-a MODEL=/mnt/shared/model OUT=/mnt/shared/run \
#     bash examples/tpu_vm.sh
#   RESUME=--resume TPU=... bash examples/tpu_vm.sh   # goes on
#
# MODEL and OUT: paths on a file system that every host has mounted, such as
# Filestore. To change: --task, --mesh and the sizes; see docs/scale.md.
# https://docs.cloud.google.com/tpu/docs/jax-pods
# Not run on a cluster; checked by tests/train/test_examples.py.
set -euo pipefail
: "${TPU:?name of the slice}" "${ZONE:?its zone}"
: "${MODEL:?path of the model}" "${OUT:?run folder}"

everywhere() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
    --command="$1"
}

git archive --prefix=sr-optax/ --output=/tmp/sr-optax.tar.gz HEAD
gcloud compute tpus tpu-vm scp /tmp/sr-optax.tar.gz "$TPU": --zone="$ZONE" \
  --worker=all
# uv brings a Python of its own: the images may have one older than 3.11.
everywhere "tar xzf sr-optax.tar.gz && cd sr-optax &&
  python3 -m pip install --quiet --user uv &&
  python3 -m uv venv --quiet --clear --python 3.12 &&
  python3 -m uv pip install --quiet --editable . --group train 'jax[tpu]'"
everywhere "cd sr-optax && .venv/bin/python -m train --distributed \
  ${RESUME:-} --out $OUT --model $MODEL --task reasoning_gym:chain_sum \
  --mesh fsdp=-1 --prompts 64 --group 8 --micro-batch 16 \
  --max-new-tokens 256 --lr 1e-6 --steps 200 --checkpoint-every 50"
