#!/bin/bash
# Two machines, 8 workers: workers 5 to 8 on machine 2; machine 1 has the scheduler.
# Give both scripts the same MS_SCHED_HOST, machine 1's address, and the same key in MSCOMM_JOB_KEY_FILE. For a second
# job on these machines give both another MS_SCHED_PORT, and set MSCOMM_JOB_ID to a text of its own.

[ -n "$MSCOMM_JOB_KEY_FILE" ] && MSCOMM_JOB_KEY_FILE=$(realpath -ms "$MSCOMM_JOB_KEY_FILE")
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
LOGS=${LOGS:-.}
: "${MSCOMM_JOB_KEY_FILE:?"make a key once, (umask 077; head -c 32 /dev/urandom > job.key), and copy it to each machine"}"

export MS_WORKER_NUM=${MS_WORKER_NUM:-8}
export MS_SCHED_HOST=${MS_SCHED_HOST:?"machine 1's address"}
export MS_SCHED_PORT=${MS_SCHED_PORT:-8117}
HERE=$((MS_WORKER_NUM / 2))

# However the script ends, by a signal while it starts too, it ends what it has started, and waits for that.
# A copy of bash that has not become its command yet would forget the signal: it still has the script's command line.
trap 'for pid in $(jobs -p); do
    while cmp -s /proc/$$/cmdline /proc/$pid/cmdline; do sleep 0.01; done
    kill $pid 2>/dev/null
done; wait' EXIT
trap 'exit 130' INT  # without a trap bash forgets a SIGINT if it waits for a command that ends well

# Launch the workers of this machine.
export MS_ROLE=MS_WORKER
pids=()
for((i=HERE;i<MS_WORKER_NUM;i++));
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
