"""MindSpore's operators: communication over mscomm, and computing over PyTorch.

The communication operators (communication.py) accept the arrays of every library and need no PyTorch. The computing
operators (computing.py, composite.py) need PyTorch, which is imported when one of them is first used. The name of any
other operator of MindSpore raises an AttributeError that says what PyTorch has instead.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mscomm.ops.communication import AllGather as AllGather
from mscomm.ops.communication import AllReduce as AllReduce
from mscomm.ops.communication import AlltoAll as AlltoAll
from mscomm.ops.communication import Barrier as Barrier
from mscomm.ops.communication import Broadcast as Broadcast
from mscomm.ops.communication import CollectiveGather as CollectiveGather
from mscomm.ops.communication import CollectiveScatter as CollectiveScatter
from mscomm.ops.communication import Receive as Receive
from mscomm.ops.communication import Reduce as Reduce
from mscomm.ops.communication import ReduceOp as ReduceOp
from mscomm.ops.communication import ReduceScatter as ReduceScatter
from mscomm.ops.communication import Send as Send

if TYPE_CHECKING:
    from mscomm.ops.composite import *  # noqa: F403
    from mscomm.ops.computing import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module 'mscomm.ops' has no attribute {name!r}")
        importlib.import_module("mscomm.tensor")  # first, because its error message says what is missing
        for module in ("computing", "composite"):
            found = importlib.import_module(f"mscomm.ops.{module}")
            if name in found.__all__:
                globals()[name] = value = getattr(found, name)
                return value
        operator = importlib.import_module("mscomm.ops.operator")
        raise AttributeError(operator.missing("ops", name))
