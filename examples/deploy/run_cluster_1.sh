#!/bin/bash
# Runs a job of 8 workers on two machines. This script starts the scheduler and the first 4 workers on machine 1. On
# both machines, set MS_SCHED_HOST to the address of machine 1, and MSCOMM_JOB_KEY_FILE to the path of a file with the
# same key. For a second job on these machines, set a different MS_SCHED_PORT and a different MSCOMM_JOB_ID on both.

[ -n "$MSCOMM_JOB_KEY_FILE" ] && MSCOMM_JOB_KEY_FILE=$(realpath -ms "$MSCOMM_JOB_KEY_FILE")
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
LOGS=${LOGS:-.}
: "${MSCOMM_JOB_KEY_FILE:?"make a key once, (umask 077; head -c 32 /dev/urandom > job.key), and copy it to each machine"}"

export MS_WORKER_NUM=${MS_WORKER_NUM:-8}
export MS_SCHED_HOST=${MS_SCHED_HOST:?"machine 1's address"}
export MS_SCHED_PORT=${MS_SCHED_PORT:-8117}
HERE=$((MS_WORKER_NUM / 2))

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
"$PYTHON" nccl_allgather.py > "$LOGS/scheduler.log" 2>&1 &
pids=($!)

# Launch the workers of this machine.
export MS_ROLE=MS_WORKER
for((i=0;i<HERE;i++));
do
    "$PYTHON" nccl_allgather.py > "$LOGS/worker_$i.log" 2>&1 &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=1
done
[ $status -eq 0 ] || echo "the job failed: see the logs in $LOGS" >&2
exit $status
