#!/bin/bash
# mpirun starts this script for each rank. Here you can set variables that differ between machines. Do not add & to the
# last line, because mpirun would then end while the ranks are still running.

# If the machines have several networks, choose one. An address range is the same on all machines. The name of a network
# interface, as in the next line, can differ between machines.
# export NCCL_SOCKET_IFNAME="en5"
[ -n "$NETWORK" ] && export MSCOMM_SOCKET_IFNAME="$NETWORK"   # e.g. 10.0.0.0/8

cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python3}" nccl_allgather.py
