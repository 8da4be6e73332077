"""Gathers results of different lengths: each rank finds primes in its share of the numbers, and rank 0 gathers them.

    mscomm run -n 4 uneven_gather.py

A rank that finds no primes passes an empty array.
"""

import numpy as np

import mscomm

LIMIT = 10_000


def main() -> None:
    mscomm.init()
    rank, size = mscomm.get_rank(), mscomm.get_group_size()

    mine = np.arange(rank * LIMIT // size, (rank + 1) * LIMIT // size)
    primes = np.array([n for n in mine if n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))], dtype=np.int64)

    found = mscomm.gather_v(primes)
    if found is not None:  # only rank 0 gets the result
        rows, counts = found
        print(f"{len(rows)} primes below {LIMIT}, by rank {counts}; the largest is {rows[-1]}")
    mscomm.release()


if __name__ == "__main__":
    main()
