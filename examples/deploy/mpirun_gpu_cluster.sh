#!/bin/bash
# What mpirun starts for each rank; here each machine can have variables of its own.
# Do not end the last line with &: mpirun would end while the ranks go on.

# The network between the machines. An address range is the same on all of them; the name of the card may not be:
# export NCCL_SOCKET_IFNAME="en5"
[ -n "$NETWORK" ] && export MSCOMM_SOCKET_IFNAME="$NETWORK"   # e.g. 10.0.0.0/8

cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python3}" nccl_allgather.py
