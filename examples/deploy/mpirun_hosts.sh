#!/bin/bash
# 16 ranks on two machines by Open MPI: bash mpirun_hosts.sh DEVICE1_IP:8,DEVICE2_IP:8
# Both machines have the same mscomm at the same path, let you in by ssh without a password, and have the key file.

HOSTS=${1:?"say which machines: bash mpirun_hosts.sh DEVICE1_IP:8,DEVICE2_IP:8"}
[ -n "$MSCOMM_JOB_KEY_FILE" ] && MSCOMM_JOB_KEY_FILE=$(realpath -ms "$MSCOMM_JOB_KEY_FILE")
cd "$(dirname "$0")/.." || exit 1
PYTHON=$(command -v "${PYTHON:-python3}")
: "${MSCOMM_JOB_KEY_FILE:?"make a key once, (umask 077; head -c 32 /dev/urandom > job.key), and copy it to each machine"}"

# Where mpirun is installed here, its daemons are there. Only Open MPI wants to be told about root.
FLAGS=(--prefix "$(dirname "$(dirname "$(command -v mpirun)")")")
[ "$(id -u)" -eq 0 ] && FLAGS+=(--allow-run-as-root)

exec mpirun "${FLAGS[@]}" -n "${RANKS:-16}" -H "$HOSTS" -x MSCOMM_JOB_KEY_FILE "$PYTHON" nccl_allgather.py
