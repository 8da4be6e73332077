#!/bin/bash
# mpirun starts this script for each rank. Each machine can set variables of its own here.
# Do not end the last line with &: mpirun would end while the ranks still run.

# The network between the machines. An address range is the same on all of them; a card's name, as here, may differ:
# export NCCL_SOCKET_IFNAME="en5"
[ -n "$NETWORK" ] && export MSCOMM_SOCKET_IFNAME="$NETWORK"   # e.g. 10.0.0.0/8

cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python3}" nccl_allgather.py
