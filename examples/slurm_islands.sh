#!/bin/bash
# sbatch examples/slurm_islands.sh your_script.py
#SBATCH --job-name=islands
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
# The job goes on when a node fails.
#SBATCH --no-kill
set -euo pipefail

# This script runs on the first node, and keeps the store where islands meet.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
where=${ISLANDS_HOST:-$first}:$((20000 + SLURM_JOB_ID % 10000))
export BAGUA_ISLANDS=tcp://$where
baguarun --serve-islands "$where" &
store=$!
trap 'kill $store' EXIT

# One island on each node. One that ends without success starts again, and the
# others do not wait for it.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
srun --kill-on-bad-exit=0 --no-kill bash -c '
    for _ in {1..100}; do
        python "$@" && exit 0
        echo "island $SLURM_PROCID ended with status $?; it starts again"
        sleep 1
    done
    exit 1' island "$@"
