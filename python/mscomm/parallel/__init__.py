"""Divides the operators of a network among the ranks: strategies, plans, and their execution.

>>> plan = mscomm.parallel.plan(net, [np.zeros((16, 32), np.float32)], ranks=8)
>>> print(plan)
"""

from __future__ import annotations

from mscomm import tensor as _tensor  # noqa: F401  # first, because its error message says what is missing
from mscomm.parallel.execution import Divided as Divided
from mscomm.parallel.execution import divide as divide
from mscomm.parallel.planning import Plan as Plan
from mscomm.parallel.planning import Transfer as Transfer
from mscomm.parallel.planning import plan as plan
from mscomm.parallel.search import Machine as Machine
from mscomm.parallel.sharding import shard as shard
