#!/bin/bash
# Trains by a rank table: RANK_SIZE processes, each with RANK_ID and DEVICE_ID in a folder ./device<rank> of its own,
# with its log and its checkpoints. RESUME=1 keeps the folders, and training goes on behind the newest checkpoint.

echo "=============================================================================================================="
echo "Please run the script as: "
echo "bash run.sh DATA_PATH RANK_SIZE"
echo "For example: bash run.sh /path/dataset 2"
echo "=============================================================================================================="
. "$(dirname "$0")/processes.sh"
data_path "$1"
export RANK_SIZE=${2:?"the second argument is the number of ranks, 2 or 8"}
[ -n "$RANK_TABLE_FILE" ] && RANK_TABLE_FILE=$(realpath "$RANK_TABLE_FILE")
cd "$(dirname "$0")" || exit 1

EXEC_PATH=$(pwd)
export RANK_TABLE_FILE=${RANK_TABLE_FILE:-${EXEC_PATH}/rank_table_${RANK_SIZE}pcs.json}
if [ ! -f "$RANK_TABLE_FILE" ]; then
    echo "run.sh: there is no $RANK_TABLE_FILE; write one as rank_table_2pcs.json, with $RANK_SIZE devices" >&2
    exit 2
fi

for((i=0;i<RANK_SIZE;i++))
do
    [ -n "$RESUME" ] || rm -rf device$i
    mkdir -p device$i
    cd device$i || exit 1
    export DEVICE_ID=$i
    export RANK_ID=$i
    echo "start training for device $i"
    env | grep -E '^(RANK|DEVICE|DATA|MSCOMM|OMP)_' > env$i.log
    begin train.log$i "$PYTHON" -m pytest -s -v ../resnet50_distributed_training.py
    cd ..
done
finish "device*/train.log*" || exit 2
