#!/bin/bash
# Starts 16 ranks on two machines with Open MPI: bash mpirun_hosts.sh DEVICE1_IP:8,DEVICE2_IP:8
# Both machines need the same mscomm at the same path, the key file, and ssh access without a password.

HOSTS=${1:?"say which machines: bash mpirun_hosts.sh DEVICE1_IP:8,DEVICE2_IP:8"}
[ -n "$MSCOMM_JOB_KEY_FILE" ] && MSCOMM_JOB_KEY_FILE=$(realpath -ms "$MSCOMM_JOB_KEY_FILE")
cd "$(dirname "$0")/.." || exit 1
PYTHON=$(command -v "${PYTHON:-python3}")
: "${MSCOMM_JOB_KEY_FILE:?"make a key once, (umask 077; head -c 32 /dev/urandom > job.key), and copy it to each machine"}"

# --prefix tells mpirun that Open MPI is installed at the same path on the other machines.
# Open MPI needs a flag to run as root.
FLAGS=(--prefix "$(dirname "$(dirname "$(command -v mpirun)")")")
[ "$(id -u)" -eq 0 ] && FLAGS+=(--allow-run-as-root)

exec mpirun "${FLAGS[@]}" -n "${RANKS:-16}" -H "$HOSTS" -x MSCOMM_JOB_KEY_FILE "$PYTHON" nccl_allgather.py
