"""mscomm as a backend of torch.distributed, and beside another backend.

>>> import torch.distributed as dist
>>> dist.init_process_group("mscomm")

`import torch` registers the backend if mscomm is installed. After TORCH_DEVICE_BACKEND_AUTOLOAD=0, `import
mscomm.torch` registers it. It runs the calls on CPU tensors that the backend gloo runs. Each default process group is a
job of mscomm (mscomm.join), which torch's store brings together; the other process groups are groups of this job.

group returns the mscomm Group of a process group. ddp_hook lets mscomm average the gradients of torch's
DistributedDataParallel, whatever the backend of its process group is.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mscomm.torch.registration import register

if TYPE_CHECKING:
    from mscomm.torch.gradients import ddp_hook
    from mscomm.torch.process_group import group

__all__ = ["ddp_hook", "group"]

# `import torch` imports this file, so it must import nothing slow.
_MODULE_OF = {"ddp_hook": "mscomm.torch.gradients", "group": "mscomm.torch.process_group"}

register()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mscomm.torch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
