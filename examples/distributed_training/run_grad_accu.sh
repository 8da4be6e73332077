#!/bin/bash
# Trains with mpirun and gradient accumulation: DEVICE_NUM processes (8), their output in ./device/train.log. Each step
# takes MINI_STEPS batches (4). Ends with mpirun's exit code.

echo "=============================================================================================================="
echo "Please run the script as: "
echo "bash run_grad_accu.sh DATA_PATH"
echo "For example: bash run_grad_accu.sh /path/dataset"
echo "=============================================================================================================="
. "$(dirname "$0")/processes.sh"
data_path "$1"
cd "$(dirname "$0")" || exit 1
train_by_mpirun resnet50_distributed_training_grad_accu.py
