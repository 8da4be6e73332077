#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
# sbatch slurm.sh. The ranks meet at the first node of the step. Without MSCOMM_JOB_KEY_FILE rank 0 leaves the job's key
# in ~/.mscomm, where only you can read it: the nodes must share your home.

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun python3 nccl_allgather.py
