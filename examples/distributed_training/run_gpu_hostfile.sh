#!/bin/bash
# Trains with mpirun on the machines of a hostfile: RANKS processes (16), their output in ./device/train.log here.
# The machines have the same Python and this folder at the same path, let you in by ssh without a password, and have the
# data at DATA_PATH and the key file; ../deploy/hostfile shows a hostfile.

echo "=============================================================================================================="
echo "Please run the script as: "
echo "bash run_gpu_hostfile.sh DATA_PATH HOSTFILE"
echo "For example: RANKS=16 bash run_gpu_hostfile.sh /path/dataset hostfile"
echo "=============================================================================================================="
. "$(dirname "$0")/processes.sh"
data_path "$1"
need_key
need_mpirun
HOSTFILE=$(realpath "${2:?"the second argument is the hostfile, with lines like: DEVICE1 slots=8"}")
cd "$(dirname "$0")" || exit 1

# Where mpirun is installed here, its daemons are there. Only Open MPI wants to be told about root.
FLAGS=(--bind-to none --prefix "$(dirname "$(dirname "$(command -v mpirun)")")")
[ "$(id -u)" -eq 0 ] && FLAGS+=(--allow-run-as-root)
for name in MSCOMM_SOCKET_IFNAME IMAGE_SIZE BATCH_SIZE EPOCH_SIZE OMP_NUM_THREADS; do
    [ -n "${!name}" ] && FLAGS+=(-x "$name")
done

rm -rf device
mkdir device
echo "start training: the log is ./device/train.log"
begin device/train.log mpirun "${FLAGS[@]}" -n "${RANKS:-16}" --hostfile "$HOSTFILE" \
    -x DATA_PATH -x PATH -x MSCOMM_JOB_KEY_FILE -mca pml ob1 \
    "$(command -v "$PYTHON")" -m pytest -s -v "$PWD/resnet50_distributed_training_gpu.py"
finish device/train.log
