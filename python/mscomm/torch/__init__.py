"""mscomm as a backend of torch.distributed.

>>> import torch.distributed as dist
>>> dist.init_process_group("mscomm")

`import torch` registers the backend if mscomm is installed. After TORCH_DEVICE_BACKEND_AUTOLOAD=0, `import
mscomm.torch` registers it. It runs the calls on CPU tensors that the backend gloo runs. Each default process group is a
job of mscomm (mscomm.join), which torch's store brings together; the other process groups are groups of this job.
"""

from mscomm.torch.registration import register

register()
