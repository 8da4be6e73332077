"""Provides mscomm's functions under the names of mindspore.communication.management."""

from __future__ import annotations

from mscomm.job import WORLD_NAMES
from mscomm.job import get_backend as _get_backend
from mscomm.job import get_group_rank_from_world_rank as get_group_rank_from_world_rank
from mscomm.job import get_group_size as get_group_size
from mscomm.job import get_local_rank as get_local_rank
from mscomm.job import get_local_rank_size as get_local_rank_size
from mscomm.job import get_process_group_ranks as get_process_group_ranks
from mscomm.job import get_rank as get_rank
from mscomm.job import get_world_rank_from_group_rank as get_world_rank_from_group_rank
from mscomm.job import init as init
from mscomm.job import is_initialized as _is_initialized
from mscomm.job import release as release
from mscomm.subgroups import create_group as create_group
from mscomm.subgroups import destroy_group as destroy_group

# Each of these three names stands for the group of all ranks, with any backend.
HCCL_WORLD_COMM_GROUP, NCCL_WORLD_COMM_GROUP, MCCL_WORLD_COMM_GROUP = WORLD_NAMES


class _State(type):
    """Provides the attributes of GlobalComm that MindSpore's init() sets. Each access returns the current value."""

    @property
    def INITED(cls) -> bool:
        """Whether init() has joined a job."""
        return _is_initialized()

    @property
    def BACKEND(cls) -> str:
        """The backend of the job. Raises RuntimeError before init()."""
        return _get_backend()


class GlobalComm(metaclass=_State):
    """What MindSpore scripts read about the job: WORLD_COMM_GROUP, INITED and BACKEND. Scripts must not set them."""

    WORLD_COMM_GROUP = HCCL_WORLD_COMM_GROUP
