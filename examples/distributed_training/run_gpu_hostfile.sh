#!/bin/bash
# Trains with mpirun in RANKS processes (default 16) on the machines of a hostfile. The output is in ./device/train.log on
# this machine. All machines need the same Python and this folder at the same paths, the data at DATA_PATH, the key file,
# and ssh access without a password. ../deploy/hostfile is an example of a hostfile.

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

# --prefix tells mpirun that Open MPI is installed at the same path on the other machines.
# Open MPI needs a flag to run as root.
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
