#!/bin/bash
# Trains net.py with 1 scheduler and MS_WORKER_NUM workers (8), and waits for them; fails if one of them failed.

echo "=============================================================================================================="
echo "Please run the script as: "
echo "bash run.sh"
echo "For example: MS_WORKER_NUM=4 bash run.sh"
echo "=============================================================================================================="
cd "$(dirname "$0")" || exit 1
PYTHON=${PYTHON:-python3}

export MS_WORKER_NUM=${MS_WORKER_NUM:-8}
export MS_SCHED_HOST=${MS_SCHED_HOST:-127.0.0.1}
# A free port, and a name for the job, so that two jobs on one machine stay apart.
export MS_SCHED_PORT=${MS_SCHED_PORT:-$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
export MSCOMM_JOB_ID=${MSCOMM_JOB_ID:-$HOSTNAME-$$}

# However the script ends, by a signal while it starts too, it ends what it has started, and waits for that.
# A copy of bash that has not become its command yet would forget the signal: it still has the script's command line.
trap 'for pid in $(jobs -p); do
    while cmp -s /proc/$$/cmdline /proc/$pid/cmdline; do sleep 0.01; done
    kill $pid 2>/dev/null
done; wait' EXIT
trap 'exit 130' INT  # without a trap bash forgets a SIGINT if it waits for a command that ends well

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
