#!/bin/bash
# Trains with a rank table: starts a process for each rank of this server, with its RANK_ID and DEVICE_ID. Each process
# has a folder ./device<rank> for its log and its checkpoints. With RESUME=1, the folders are kept, and training
# continues after the newest checkpoint. If the table has several servers, start the script on each server. SERVER_ID is
# the server_id of this machine in the table. If SERVER_ID is not set, the script uses the server_id that is an address
# or the name of this machine.

echo "=============================================================================================================="
echo "Please run the script as: "
echo "bash run.sh DATA_PATH RANK_SIZE"
echo "For example: bash run.sh /path/dataset 2"
echo "=============================================================================================================="
. "$(dirname "$0")/processes.sh"
data_path "$1"
export RANK_SIZE=${2:?"the second argument is the number of ranks, 2, 8 or 16"}
[ -n "$RANK_TABLE_FILE" ] && RANK_TABLE_FILE=$(realpath "$RANK_TABLE_FILE")
cd "$(dirname "$0")" || exit 1

EXEC_PATH=$(pwd)
export RANK_TABLE_FILE=${RANK_TABLE_FILE:-${EXEC_PATH}/rank_table_${RANK_SIZE}pcs.json}
if [ ! -f "$RANK_TABLE_FILE" ]; then
    echo "run.sh: there is no $RANK_TABLE_FILE; mscomm ranktable make writes one, with $RANK_SIZE devices" >&2
    exit 2
fi

# Get one line for each rank of this server, with the rank's RANK_ID and DEVICE_ID.
here=$("$PYTHON" -m mscomm ranktable ranks --size "$RANK_SIZE" ${SERVER_ID:+--server "$SERVER_ID"} "$RANK_TABLE_FILE") ||
    exit 2
mapfile -t ranks <<< "$here"
[ "${#ranks[@]}" != "$RANK_SIZE" ] && need_key

for line in "${ranks[@]}"
do
    read -r RANK_ID DEVICE_ID <<< "$line"
    export RANK_ID DEVICE_ID
    [ -n "$RESUME" ] || rm -rf "device$RANK_ID"
    mkdir -p "device$RANK_ID"
    cd "device$RANK_ID" || exit 1
    echo "start training for rank $RANK_ID, device $DEVICE_ID"
    env | grep -E '^(RANK|DEVICE|DATA|MSCOMM|OMP)_' > "env$RANK_ID.log"
    begin "train.log$RANK_ID" "$PYTHON" -m pytest -s -v ../resnet50_distributed_training.py
    cd ..
done
finish "device*/train.log*" || exit 2
