#!/bin/bash
# Runs a job of 8 workers on two machines. This script starts the last 4 workers on machine 2. The scheduler and the
# first 4 workers are on machine 1. On both machines, set MS_SCHED_HOST to the address of machine 1, and
# MSCOMM_JOB_KEY_FILE to the path of a file with the same key. For a second job on these machines, set a different
# MS_SCHED_PORT and a different MSCOMM_JOB_ID on both.

echo "=========================================="
echo "Please run the script as: "
echo "bash run_gpu_cluster_2.sh DATA_PATH"
echo "For example: bash run_gpu_cluster_2.sh /path/dataset"
echo "==========================================="
. "$(dirname "$0")/processes.sh"
data_path "$1"
need_key
cd "$(dirname "$0")" || exit 1

export MS_WORKER_NUM=${MS_WORKER_NUM:-8}
export MS_SCHED_HOST=${MS_SCHED_HOST:?"machine 1's address"}
export MS_SCHED_PORT=${MS_SCHED_PORT:-8118}

rm -rf device_2
mkdir device_2
echo "start training: the logs are ./device_2/worker_*.log"

# Launch the second half of the workers.
export MS_ROLE=MS_WORKER
for((i=MS_WORKER_NUM/2;i<MS_WORKER_NUM;i++));
do
    begin device_2/worker_$i.log "$PYTHON" -m pytest -s -v resnet50_distributed_training_gpu.py
done
finish "device_2/worker_*.log"
