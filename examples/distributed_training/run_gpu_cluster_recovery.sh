#!/bin/bash
# Trains with 1 scheduler and MS_WORKER_NUM workers (default 8) on this machine, without mpirun. If you start a lost
# process again, training goes on: README.md shows the commands. The logs and the checkpoints are in ./device.

echo "=========================================="
echo "Please run the script as: "
echo "bash run_gpu_cluster_recovery.sh DATA_PATH"
echo "For example: bash run_gpu_cluster_recovery.sh /path/dataset"
echo "==========================================="
. "$(dirname "$0")/processes.sh"
data_path "$1"
[ -n "$MS_RECOVERY_PATH" ] && MS_RECOVERY_PATH=$(realpath -m "$MS_RECOVERY_PATH")
cd "$(dirname "$0")" || exit 1

export MS_ENABLE_RECOVERY=1 # Enable recovery
export MS_RECOVERY_PATH=${MS_RECOVERY_PATH:-$PWD/device/recovery} # Set recovery path

export MS_WORKER_NUM=${MS_WORKER_NUM:-8}
export MS_SCHED_HOST=${MS_SCHED_HOST:-127.0.0.1}
# A process that is started again needs the same port, so the port is fixed.
export MS_SCHED_PORT=${MS_SCHED_PORT:-8118}

rm -rf device
mkdir device
cd device || exit 1
echo "start training: the logs are ./device/scheduler.log and ./device/worker_*.log"

# Launch 1 scheduler.
export MS_ROLE=MS_SCHED
export MS_NODE_ID=sched # The node id for the scheduler
begin scheduler.log "$PYTHON" -m pytest -s -v ../resnet50_distributed_training_gpu_recovery.py

# Launch the workers.
export MS_ROLE=MS_WORKER
for((i=0;i<MS_WORKER_NUM;i++));
do
    export MS_NODE_ID=worker_$i # The node id for each worker
    begin worker_$i.log "$PYTHON" -m pytest -s -v ../resnet50_distributed_training_gpu_recovery.py
done
finish "device/scheduler.log and device/worker_*.log"
