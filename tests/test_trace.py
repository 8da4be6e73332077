"""mscomm trace: what it reads from the ranks' records. Some records are made up, others are real or damaged."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sessions import invoke, run

from mscomm.cli import trace


def call(number: int, began: float, took: float = 0.001, state: str = "done", **more: Any) -> dict[str, Any]:
    text = f"all_reduce #{number} (float32[4], sum)"
    return {"number": number, "call": text, "state": state, "began": 1e9 + began, "took": took, **more}


def leave(folder: Path, rank: int, calls: list[dict[str, Any]], cause: str = "rank 1 was lost", size: int = 3) -> Path:
    path = folder / f"rank_{rank}.json"
    path.write_text(json.dumps({"rank": rank, "size": size, "cause": cause, "calls": calls}))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Write the records of a job in which rank 2 is 100 ms late in call 1, and is still in call 2 when call 3 fails on
    rank 0. Rank 1 leaves no record.
    """
    leave(tmp_path, 0, [call(1, 0.0), call(2, 0.2), call(3, 0.3, state="failed", line="train.py:9")])
    leave(tmp_path, 2, [call(1, 0.1, line="train.py:7"), call(2, 0.201, 0.0, "inside", line="train.py:8")])
    return tmp_path


traced = partial(invoke, trace.command)


def test_the_last_to_come_is_named_with_its_line_and_what_it_cost(job: Path) -> None:
    done = traced(job)
    assert done.exit_code == 0, done.output
    line = next(line for line in done.output.splitlines() if "all_reduce #1 " in line)
    assert " ".join(line.split()) == "100.0 ms 100.0 ms rank 2 all_reduce #1 (float32[4], sum) train.py:7"


def test_ranks_that_are_behind_and_ranks_without_a_record_are_told(job: Path) -> None:
    lines = traced(job).output.splitlines()
    assert lines[0] == "2 of 3 ranks left a record"
    assert lines[1].startswith("No record of rank 1:")
    assert any(line.split()[:2] == ["2", "all_reduce"] and "inside" in line and "1 call" in line for line in lines)


def test_the_cause_is_told_with_the_ranks_that_saw_it(job: Path) -> None:
    assert "Cause (ranks 0 and 2): rank 1 was lost" in traced(job).output


def test_waiting_is_summed_over_ranks_and_calls(tmp_path: Path) -> None:
    leave(tmp_path, 0, [call(1, 0.0), call(2, 1.0)])
    leave(tmp_path, 1, [call(1, 0.5), call(2, 2.0)])
    leave(tmp_path, 2, [call(1, 0.75), call(2, 1.5)])
    records, complaints = trace.read(tmp_path)
    assert complaints == []
    assert [(late.call.number, late.rank, late.after_first_s, late.waited_s) for late in trace.lateness(records)] == [
        (1, 2, 0.75, 1.0),
        (2, 1, 1.0, 1.5),
    ]


def test_a_call_that_a_rank_never_reached_blames_nobody_who_did(job: Path) -> None:
    leave(job, 1, [call(1, 0.05), call(2, 0.2), call(3, 0.4)])
    records, _ = trace.read(job)
    assert [late.call.number for late in trace.lateness(records)] == [1, 2]


def test_each_group_of_a_rank_has_a_file_and_numbers_of_its_own(tmp_path: Path) -> None:
    leave(tmp_path, 0, [call(1, 0.0)])
    leave(tmp_path, 2, [call(1, 0.1)])
    for rank, began in ((0, 0.5), (2, 0.3)):
        words = {"rank": rank, "size": 2, "group": "pair", "cause": "rank 1 was lost", "calls": [call(1, began)]}
        (tmp_path / f"rank_{rank}.pair.json").write_text(json.dumps(words))
    records, complaints = trace.read(tmp_path)
    assert (complaints, [(record.rank, record.size) for record in records]) == ([], [(0, 3), (2, 3)])
    assert [(late.call.group, late.call.number, late.rank) for late in trace.lateness(records)] == [
        ("pair", 1, 0),
        ("world", 1, 2),
    ]
    output = traced(tmp_path).output
    assert output.startswith("2 of 3 ranks left a record\nNo record of rank 1")
    assert "pair: all_reduce #1 (float32[4], sum)" in output


def test_top_says_how_many_calls_are_listed(job: Path) -> None:
    assert "The 1 calls of 2 in which" in traced("--top", 1, job).output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"rank": 1, "size": 3, "cause": "x"}', "'calls' is missing or not of type list"),
        ('{"rank": 1, "size": 3, "cause": "x", "calls": [{"number": "one"}]}', "one of its calls is {'number': 'one'}"),
        ('{"rank": 7, "size": 9, "cause": "x", "calls": []}', "it says that it is rank 7's"),
    ],
)
def test_a_damaged_file_is_told_and_the_rest_is_read(job: Path, text: str, said: str) -> None:
    (job / "rank_1.json").write_text(text)
    done = traced(job)
    assert done.exit_code == 0
    assert "rank_1.json: " in done.output and said in done.output and "it is left out" in done.output
    assert "2 of 3 ranks left a record" in done.output


def test_a_file_that_cannot_be_read_is_told(job: Path) -> None:
    (job / "rank_1.json").mkdir()
    done = traced(job)
    assert done.exit_code == 0
    assert "rank_1.json: [Errno 21] Is a directory" in done.output


def test_a_folder_without_records_is_an_error_that_says_how_to_get_them(tmp_path: Path) -> None:
    done = traced(tmp_path)
    assert done.exit_code == 1
    assert "has no record that can be read" in done.output and "MSCOMM_RECORD" in done.output


def test_merge_writes_one_trace_with_an_event_for_each_call(job: Path) -> None:
    done = traced("merge", job, "-o", job / "trace.json")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in job.iterdir()) == ["rank_0.json", "rank_2.json", "trace.json"]
    merged = json.loads((job / "trace.json").read_text())
    calls = [event for event in merged["traceEvents"] if event["ph"] in ("X", "B")]
    assert [(event["pid"], event["ph"]) for event in calls] == [(0, "X")] * 3 + [(2, "X"), (2, "B")]
    assert [event["ts"] for event in calls] == pytest.approx([0, 200e3, 300e3, 100e3, 201e3], abs=1)  # in microseconds
    assert calls[0]["dur"] == 1000.0
    assert calls[2]["args"] == {"call": "all_reduce #3 (float32[4], sum)", "state": "failed", "line": "train.py:9"}


def test_merge_into_a_folder_that_is_not_there_is_an_error(job: Path) -> None:
    done = traced("merge", job, "-o", job / "nowhere" / "trace.json")
    assert done.exit_code == 1
    assert "No such file or directory" in done.output


FAILING = """
import time
import numpy as np
import mscomm

mscomm.init()
for step in range(4):
    if mscomm.get_rank() == 1 and step == 2:
        time.sleep(2)  # longer than any other delay, even on a busy machine
    mscomm.all_reduce(np.ones(4))
if mscomm.get_rank() == 0:
    mscomm.abort("enough")
mscomm.barrier()
"""


def test_the_records_of_a_real_job_are_read(tmp_path: Path) -> None:
    script, records = tmp_path / "failing.py", tmp_path / "records"
    script.write_text(FAILING)
    command = [sys.executable, "-m", "mscomm", "run", "-n", "3", "--log_dir", str(records), str(script)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MSCOMM_", "MS_"))}
    run(command, env=env)
    done = traced("show", "--top", 1, records)
    assert done.exit_code == 0, done.output
    assert "rank 0 called abort: enough" in done.output
    assert f"rank 1  all_reduce #3 (float64[4], sum)  {script}:10" in done.output
