#!/bin/bash
# Trains with 1 scheduler and MS_WORKER_NUM workers (default 8) on this machine, without mpirun. The logs are in ./device.

echo "=========================================="
echo "Please run the script as: "
echo "bash run_gpu_cluster.sh DATA_PATH"
echo "For example: bash run_gpu_cluster.sh /path/dataset"
echo "==========================================="
. "$(dirname "$0")/processes.sh"
data_path "$1"
cd "$(dirname "$0")" || exit 1

export MS_WORKER_NUM=${MS_WORKER_NUM:-8}
export MS_SCHED_HOST=${MS_SCHED_HOST:-127.0.0.1}
# Use a free port and a unique name for this job, so that the ranks of two jobs on one machine are not mixed up.
export MS_SCHED_PORT=${MS_SCHED_PORT:-$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
export MSCOMM_JOB_ID=${MSCOMM_JOB_ID:-$HOSTNAME-$$}

rm -rf device
mkdir device
echo "start training: the logs are ./device/scheduler.log and ./device/worker_*.log"

# Launch 1 scheduler.
export MS_ROLE=MS_SCHED
begin device/scheduler.log "$PYTHON" -m pytest -s -v resnet50_distributed_training_gpu.py

# Launch the workers.
export MS_ROLE=MS_WORKER
for((i=0;i<MS_WORKER_NUM;i++));
do
    begin device/worker_$i.log "$PYTHON" -m pytest -s -v resnet50_distributed_training_gpu.py
done
finish "device/scheduler.log and device/worker_*.log"
