"""Provides the functions for jobs and groups at MindSpore's import path. Each is the same object as in mscomm.

from mscomm.communication import init, get_rank, get_group_size
"""

from __future__ import annotations

from mscomm.communication import comm_func as comm_func
from mscomm.communication import management as management
from mscomm.communication.management import HCCL_WORLD_COMM_GROUP as HCCL_WORLD_COMM_GROUP
from mscomm.communication.management import MCCL_WORLD_COMM_GROUP as MCCL_WORLD_COMM_GROUP
from mscomm.communication.management import NCCL_WORLD_COMM_GROUP as NCCL_WORLD_COMM_GROUP
from mscomm.communication.management import GlobalComm as GlobalComm
from mscomm.communication.management import create_group as create_group
from mscomm.communication.management import destroy_group as destroy_group
from mscomm.communication.management import get_group_rank_from_world_rank as get_group_rank_from_world_rank
from mscomm.communication.management import get_group_size as get_group_size
from mscomm.communication.management import get_local_rank as get_local_rank
from mscomm.communication.management import get_local_rank_size as get_local_rank_size
from mscomm.communication.management import get_process_group_ranks as get_process_group_ranks
from mscomm.communication.management import get_rank as get_rank
from mscomm.communication.management import get_world_rank_from_group_rank as get_world_rank_from_group_rank
from mscomm.communication.management import init as init
from mscomm.communication.management import release as release
