"""docs/porting.md is correct: the code in its second column runs on two ranks.

A row whose note says "in a later release" is expected to fail. A row that needs a device may fail without one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ranks import Job

import mscomm

PAGE = Path(__file__).parent.parent / "docs/porting.md"
TORCH = "needs PyTorch"
DEVICE = ("needs a GPU", "needs an NPU")  # a row whose note begins with one of these may raise BackendUnavailable


class Row(NamedTuple):
    """One row: the code on the left, the code on the right ("" for a dash), and the note."""

    theirs: str
    ours: str
    note: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| `"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, line
        assert re.fullmatch(r"`[^`]+`", cells[0]) and re.fullmatch(r"`[^`]+`|-", cells[1]), line
        found.append(Row(cells[0].strip("`"), cells[1].strip("`-"), cells[2]))
    return found


ROWS = rows()

# A row that begins with one of these texts ends its job, so it runs in a job of its own.
LAST = ("mscomm.release()", "mscomm.abort(")

# Rows that belong together: rank 0 runs the key while rank 1 runs its value.
PAIRS = {
    "mscomm.send(x, dst=1)": "mscomm.recv(out=x, src=0)",
    "mscomm.send(x, dst=1, tag=7)": "mscomm.recv(out=x, src=0, tag=7)",
    "mscomm.send_object(obj, dst=1)": "mscomm.recv_object(src=0)",
    "mscomm.send_object(obj, dst=1, tag=7)": "mscomm.recv_object(src=0, tag=7)",
    "mscomm.send(x, dst=1, tag=0)": "mscomm.recv(x, mscomm.ANY_SOURCE)",
    "mscomm.send(x, dst=1, tag=9)": "mscomm.recv(x, mscomm.ANY_SOURCE, mscomm.ANY_TAG, status=mscomm.Status())",
    "mscomm.ops.Send(0, 1)(x)": "mscomm.ops.Receive(0, 0, [4], np.float32)()",
}


# --- what each rank runs --------------------------------------------------------------------------------------------


def run_rows(codes: list[str], result: Path) -> None:
    """Run each row by itself, and write down how the row ended: "" or the error."""
    mscomm.init()
    rank, size = mscomm.get_rank(), mscomm.get_group_size()
    ended = {}
    partners = {**PAIRS, **{receive: send for send, receive in PAIRS.items()}}
    for code in codes:
        names: dict[str, Any] = {
            "np": np,
            "mscomm": mscomm,
            "rank": rank,
            "size": size,
            "x": np.arange(4, dtype=np.float32),
            "out": np.empty(4 * size, np.float32),
            "obj": {"rank": rank},
            "f": len,
        }
        mine = partners[code] if code in partners and (code in PAIRS) != (rank == 0) else code
        mscomm.reset_ps_context()  # set_ps_context must be called before init()
        try:  # the rows are programs, and the test has to run them
            exec(compile(mine, f"row {mine!r}", "exec"), names)  # noqa: S102
            ended[code] = ""
        except Exception as error:
            ended[code] = f"{type(error).__name__}: {error}"
    (result / f"ended_{rank}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    run_rows(json.loads(sys.argv[1]), Path(sys.argv[2]))


# --- the rows -------------------------------------------------------------------------------------------------------


def ended(codes: list[str], folder: Path) -> dict[str, list[str]]:
    """Run the rows on two ranks. Return how each row ended on each rank."""
    job = Job(2, [sys.executable, __file__, json.dumps(codes), str(folder)], folder, {"MSCOMM_TIMEOUT": "20"})
    job.wait(60)
    files = [folder / f"ended_{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), job.logs()
    each = [json.loads(file.read_text()) for file in files]
    return {code: [one[code] for one in each] for code in codes}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    codes = sorted({row.ours for row in ROWS if row.ours})
    together = ended([code for code in codes if not code.startswith(LAST)], tmp_path_factory.mktemp("rows"))
    for code in codes:
        if code.startswith(LAST):
            together |= ended([code], tmp_path_factory.mktemp("last"))
    return together


def running() -> list[str]:
    """Return the code of all rows that the test must run, without duplicates."""
    return list(dict.fromkeys(row.ours for row in ROWS if row.ours and not row.note.startswith(DEVICE)))


@pytest.mark.parametrize("code", dict.fromkeys(row.ours for row in ROWS if row.note.startswith(DEVICE)))
def test_what_needs_a_device_says_so_where_there_is_none(code: str) -> None:
    env = {name: text for name, text in os.environ.items() if not name.startswith("MSCOMM_")}
    done = subprocess.run([sys.executable, "-c", f"import mscomm\n{code}"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 or "mscomm.errors.BackendUnavailable: " in done.stderr, done.stderr


@pytest.mark.parametrize("code", running())
def test_what_the_page_says_to_write_runs_on_two_ranks(code: str, outcomes: dict[str, list[str]]) -> None:
    noted = any(row.note.startswith(TORCH) for row in ROWS if row.ours == code)
    if noted or re.search(r"\bnn\b", code) or any(name in code for name in mscomm._NEEDS_TORCH):
        pytest.importorskip("torch")
    assert outcomes[code] == ["", ""]


def test_a_dash_has_a_note_that_says_who_does_it() -> None:
    assert [row for row in ROWS if not row.ours and not row.note] == []


def test_no_row_stands_twice_in_a_section() -> None:
    for section in re.split(r"^##+ ", PAGE.read_text(), flags=re.M):
        left = re.findall(r"^\| (`[^`]+`) \|", section, flags=re.M)
        assert len(left) == len(set(left)), section.splitlines()[0]


# --- what the tutorials use -----------------------------------------------------------------------------------------

IMPORTS = """
from context import set_auto_parallel_context, reset_auto_parallel_context
from mindspore import LossMonitor
from mindspore import Model, ParallelMode, set_context, GRAPH_MODE, set_auto_parallel_context
from mindspore import Tensor
from mindspore import context
from mindspore import dtype as mstype
from mindspore import set_context, GRAPH_MODE, Tensor
from mindspore import set_context, GRAPH_MODE, set_ps_context, set_auto_parallel_context, ParallelMode
from mindspore import train
from mindspore.common.parameter import Parameter
from mindspore.communication import get_rank, get_group_size
from mindspore.communication import init
from mindspore.communication import init, get_rank
from mindspore.communication.management import get_rank
from mindspore.communication.management import get_rank, get_group_size
from mindspore.communication.management import init
from mindspore.context import ParallelMode
from mindspore.nn import Momentum
from mindspore.nn import Momentum, Cell, Flatten, ReLU
from mindspore.nn.optim.momentum import Momentum
from mindspore.train import Model
from mindspore.train.callback import CheckpointConfig, ModelCheckpoint, LossMonitor
from mindspore.train.callback import LossMonitor
from mindspore.train.model import Model
from resnet import resnet50
import mindspore as ms
import mindspore.common.dtype as mstype
import mindspore.dataset as ds
import mindspore.dataset.transforms as transforms
import mindspore.dataset.transforms.c_transforms as C
import mindspore.dataset.vision as vision
import mindspore.dataset.vision.c_transforms as vision
import mindspore.nn as nn
import mindspore.ops as ops
import numpy as np
import os
""".strip().splitlines()

NAMES = """
init release get_rank get_group_size get_local_rank get_local_size create_group get_world_rank_from_group_rank
get_group_rank_from_world_rank set_context GRAPH_MODE PYNATIVE_MODE device_target device_id save_graphs
save_graphs_path set_ps_context enable_ssl set_auto_parallel_context reset_auto_parallel_context STAND_ALONE
DATA_PARALLEL SEMI_AUTO_PARALLEL AUTO_PARALLEL Tensor float32 int32 AllGather Exp Log ReduceSum ReduceMean
ReduceMax OneHot Div RealDiv Mul Sub Equal MatMul ReLU shape scalar_to_array shard initializer Cell Flatten
MSELoss Momentum Parameter get_parameters trainable_params SoftmaxCrossEntropyExpand Model train LossMonitor
CheckpointConfig ModelCheckpoint load_checkpoint load_param_into_net Cifar10Dataset GeneratorDataset map
shuffle batch repeat RandomCrop RandomHorizontalFlip Resize Rescale Normalize HWC2CHW TypeCast
""".split()  # noqa: SIM905


@pytest.mark.parametrize("line", IMPORTS)
def test_every_import_line_of_the_tutorials_has_a_row(line: str) -> None:
    assert line in [row.theirs for row in ROWS]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_tutorials_has_a_row(name: str) -> None:
    assert [row for row in ROWS if " import " not in row.theirs and re.search(rf"\b{name}\b", row.theirs)]
