#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
# Start this with `sbatch slurm.sh`. The ranks meet at the first node of the job step. Without MSCOMM_JOB_KEY_FILE, rank 0
# writes the job's key to ~/.mscomm, where only you can read it. The nodes must share your home directory for that.

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun python3 nccl_allgather.py
