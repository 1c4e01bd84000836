#!/usr/bin/env bash
# rank.sh FOLDER COMMAND...: tells a process that srun started what torchrun would, its rank and its
# number on its node, and copies what it prints to FOLDER/rank-N.log.
set -uo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
mkdir -p "$1" || exit
log=$1/rank-$RANK.log
shift
# Slurm signals all processes of a step. The command decides when it ends; the copy ends after it.
trap : TERM
exec {copy}> >(
    trap '' INT TERM
    exec tee -a "$log"
)
copying=$!
"$@" >&"$copy" 2>&1 {copy}>&-
status=$?
exec {copy}>&-
wait "$copying"
exit "$status"
