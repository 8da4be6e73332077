#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
# Start this script with `sbatch slurm.sh`. The ranks connect to the first node of the job step. If MSCOMM_JOB_KEY_FILE is
# not set, rank 0 writes the job's key to ~/.mscomm, where only you can read it. In this case all nodes must share your home
# directory.

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun python3 nccl_allgather.py
