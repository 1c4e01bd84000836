#!/usr/bin/env bash
# Tells a process that srun started what torchrun would: its rank, and its number on its node.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
exec "$@"
