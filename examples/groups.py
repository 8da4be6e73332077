"""Computes y = A x on a grid of ranks. Each rank has a block of A, and is in two groups: its row and its column.

    mscomm run -n 4 groups.py

Rank (i, j) of the grid multiplies block (i, j) of A by part j of x. The sum of these products over the ranks of row i
is part i of y. Then the ranks of each column gather all parts of y.
"""

import math

import numpy as np

import mscomm

BLOCK = 3


def main() -> None:
    mscomm.init()
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    rows = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    columns = size // rows
    i, j = divmod(rank, columns)
    row = mscomm.split(color=i, key=j)
    column = mscomm.split(color=j, key=i)

    # Every rank creates the whole matrix to check the result at the end, but multiplies only its own block of it.
    generator = np.random.default_rng(7)
    matrix = generator.standard_normal((rows * BLOCK, columns * BLOCK))
    x = generator.standard_normal(columns * BLOCK)
    block = matrix[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]

    part = mscomm.all_reduce(block @ x[j * BLOCK : (j + 1) * BLOCK], group=row)
    y = mscomm.all_gather(part, group=column)

    error = mscomm.all_reduce(np.array(np.abs(y - matrix @ x).max()), op="max")
    if rank == 0:
        print(f"{rows} x {columns} ranks, the largest difference is {'none' if error < 1e-12 else error}")
    mscomm.release()


if __name__ == "__main__":
    main()
