#!/bin/bash
# Trains with mpirun in DEVICE_NUM processes (default 8). The log is ./device/train.log. Exits with the status of mpirun.

echo "=============================================================================================================="
echo "Please run the script as: "
echo "bash run_gpu.sh DATA_PATH"
echo "For example: bash run_gpu.sh /path/dataset"
echo "=============================================================================================================="
. "$(dirname "$0")/processes.sh"
data_path "$1"
cd "$(dirname "$0")" || exit 1
train_by_mpirun resnet50_distributed_training_gpu.py
