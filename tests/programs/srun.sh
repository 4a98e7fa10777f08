#!/bin/bash
# Starts the command 4 times, as `srun` does on 2 nodes with 2 tasks each: with what srun tells its tasks.
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE="2(x2)"
for task in 0 1 2 3; do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NODEID=$((task / 2)) "$@" || exit 1 &
done
wait
