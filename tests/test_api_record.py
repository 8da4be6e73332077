"""MSCOMM_RECORD: the record says on which line of the program each call was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import everybody_is_here, ranks

import mscomm


@ranks(2, env={"MSCOMM_RECORD": "{folder}"})
def record_lines(rank: int, group: Any, folder: str) -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="at most 12 dimensions"):
            mscomm.all_reduce(np.ones((1,) * 13))
    mscomm.all_gather_v(np.ones(rank))  # the test below looks for the text "line 2"
    mscomm.barrier(async_op=True).wait()  # the test below looks for the text "line 3"
    everybody_is_here()
    mscomm.abort("show the record")
    with pytest.raises(mscomm.Aborted):
        mscomm.barrier()


def test_the_record_has_the_line_of_each_call(tmp_path):
    record_lines(tmp_path=tmp_path, folder=str(tmp_path))
    calls = json.loads((tmp_path / "rank_0.json").read_text())["calls"]
    source = Path(__file__).read_text().splitlines()
    lines = [source[int(call["line"].rpartition(":")[2]) - 1] for call in calls]
    assert ["line 2" in line for line in lines[:2]] == [True, True] and "line 3" in lines[2]
