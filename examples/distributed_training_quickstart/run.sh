#!/bin/bash
# Trains net.py with 1 scheduler and MS_WORKER_NUM workers (default 8), and waits for them. Exits with status 1 if one of
# them fails.

echo "=============================================================================================================="
echo "Please run the script as: "
echo "bash run.sh"
echo "For example: MS_WORKER_NUM=4 bash run.sh"
echo "=============================================================================================================="
cd "$(dirname "$0")" || exit 1
PYTHON=${PYTHON:-python3}

export MS_WORKER_NUM=${MS_WORKER_NUM:-8}
export MS_SCHED_HOST=${MS_SCHED_HOST:-127.0.0.1}
# Use a free port and a unique name for this job, so that the ranks of two jobs on one machine are not mixed up.
export MS_SCHED_PORT=${MS_SCHED_PORT:-$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
export MSCOMM_JOB_ID=${MSCOMM_JOB_ID:-$HOSTNAME-$$}

# When this script exits, kill the processes that it has started, and wait for them. Bash starts each process as a copy
# of itself. Until the copy executes its command, it ignores the signal that kill sends, and has the same command line
# as this script. So wait until the two command lines differ.
trap 'for pid in $(jobs -p); do
    while cmp -s /proc/$$/cmdline /proc/$pid/cmdline; do sleep 0.01; done
    kill $pid 2>/dev/null
done; wait' EXIT
trap 'exit 130' INT  # without this trap, bash ignores Ctrl-C if the command that it waits for succeeds

# Launch 1 scheduler.
export MS_ROLE=MS_SCHED
"$PYTHON" net.py >scheduler.txt 2>&1 &
pids=($!)
echo "scheduler start success!"

# Launch the workers.
export MS_ROLE=MS_WORKER
for((i=0;i<${MS_WORKER_NUM};i++));
do
    "$PYTHON" net.py >worker_$i.txt 2>&1 &
    pids+=($!)
    echo "worker ${i} start success with pid ${!}"
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=1
done
[ $status -eq 0 ] || echo "training failed: see scheduler.txt and worker_*.txt" >&2
exit $status
