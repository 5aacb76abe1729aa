#!/bin/bash
# sbatch examples/slurm_job.sh examples/use_ddp.py --steps 100
#SBATCH --job-name=bagua
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -euo pipefail

# One task on each node: a torchrun, which starts the ranks of its node.
export RANKS_PER_NODE=${RANKS_PER_NODE:-2}
threads=$((SLURM_CPUS_PER_TASK / RANKS_PER_NODE))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}

# All ranks meet at the first node, on a port that other jobs hardly use.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=${MASTER_ADDR:-$first}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}

# If a node's name resolves to 127.0.0.1 or 127.0.1.1, tell Gloo which
# interface the other nodes can reach:
# export GLOO_SOCKET_IFNAME=ib0

# Quoted, because SLURM_NODEID differs from node to node.
# A node that fails ends the others.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun \
    --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" \
    --nproc_per_node "$RANKS_PER_NODE" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$@"' \
    torchrun "$@"
