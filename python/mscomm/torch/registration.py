"""Registers mscomm as a backend of torch.distributed.

`import torch` calls register() through the entry point `torch.backends`. So this module must import nothing that is
slow, and must work while mscomm.torch, which imports torch, is being imported.
"""

from __future__ import annotations

import warnings
from typing import Any

NAME = "mscomm"


def register() -> None:
    """Register the backend, unless that has been done or this torch has no torch.distributed."""
    import torch.distributed as dist

    # At one of mscomm's own calls, torch.compile ends the graph and begins another one, which is right. But it warns
    # that the function is neither traceable nor one of torch's operators, which helps nobody.
    warnings.filterwarnings("ignore", r"Dynamo does not know how to trace the builtin `mscomm\.")
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from mscomm.torch import mixed, process_group

    return mixed.part_of_mixed(process_group.create(options))
