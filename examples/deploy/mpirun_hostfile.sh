#!/bin/bash
# Starts 16 ranks on the machines of a hostfile: bash mpirun_hostfile.sh DATA_PATH HOSTFILE. The log is ./train.log. The
# option -x passes variables to all ranks. The option -mca pml ob1 affects only MPI messages; mscomm sends none.

DATA_PATH=${1:?"bash mpirun_hostfile.sh DATA_PATH HOSTFILE"}
HOSTFILE=$(realpath "${2:?"bash mpirun_hostfile.sh DATA_PATH HOSTFILE"}")
LOG=${LOG:-$PWD/train.log}
[ -n "$MSCOMM_JOB_KEY_FILE" ] && MSCOMM_JOB_KEY_FILE=$(realpath -ms "$MSCOMM_JOB_KEY_FILE")
cd "$(dirname "$0")" || exit 1
export PYTHON=${PYTHON:-$(command -v python3)}
: "${MSCOMM_JOB_KEY_FILE:?"make a key once, (umask 077; head -c 32 /dev/urandom > job.key), and copy it to each machine"}"

FLAGS=(--prefix "$(dirname "$(dirname "$(command -v mpirun)")")")
[ "$(id -u)" -eq 0 ] && FLAGS+=(--allow-run-as-root)

echo "start training: the log is $LOG"
mpirun "${FLAGS[@]}" -n "${RANKS:-16}" --hostfile "$HOSTFILE" -x DATA_PATH="$DATA_PATH" -x PATH -x PYTHON \
    -x MSCOMM_JOB_KEY_FILE -mca pml ob1 bash "$PWD/mpirun_gpu_cluster.sh" > "$LOG" 2>&1
