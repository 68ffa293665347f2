#!/bin/bash
# Trains on two machines of a Slurm cluster: a torchrun on each starts the ranks there. The arguments are those of
# `embershard train`; all machines must see the run's folder, the settings and the data.
#
#   sbatch examples/clusters/slurm.sh --config run.toml --run-dir /shared/run1
#   RANKS_PER_NODE=4 sbatch --nodes 4 --gpus-per-node 4 examples/clusters/slurm.sh --config run.toml --run-dir /shared/run2
#
#SBATCH --job-name=embershard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Ten minutes before its end the run is asked to stop: it saves a checkpoint.
#SBATCH --signal=TERM@600

set -euo pipefail
if [[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]]; then
    set -- "$@" --resume # Slurm started the job again, after a machine was lost
fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=${RANKS_PER_NODE:-8}
threads=$((SLURM_CPUS_PER_TASK / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# Since Slurm 22.05 srun does not inherit --cpus-per-task: without it, torchrun and its ranks would share one core.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "$ranks" \
    --rdzv_backend c10d --rdzv_endpoint "$first:$((20000 + SLURM_JOB_ID % 10000))" --rdzv_id "$SLURM_JOB_ID" \
    --max_restarts 3 --shutdown-timeout 540 \
    -m embershard train "$@"
