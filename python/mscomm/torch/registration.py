"""Registers mscomm as a backend of torch.distributed.

`import torch` calls register() through the entry point `torch.backends`. So this module must import nothing that is
slow, and must work while mscomm.torch, which imports torch, is being imported.
"""

from __future__ import annotations

from typing import Any

NAME = "mscomm"


def register() -> None:
    """Register the backend, unless that has been done or this torch has no torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from mscomm.torch import process_group

    return process_group.create(options)
