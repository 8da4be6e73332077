"""torchrun on two hosts: a script of PyTorch's DistributedDataParallel trains over mscomm what it trains over gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hosts import Hosts
from test_tls_jobs import Capture
from test_torch_backend import torchrun as torchrun_on_this_host
from test_torch_store import torchrun

torch = pytest.importorskip("torch")
if not hasattr(torch.distributed, "all_gather_single"):
    pytest.skip("needs torch.distributed of PyTorch 2.13 or later", allow_module_level=True)

SCRIPT = Path(__file__).with_name("ddp_script.py").read_text() + "torch.distributed.destroy_process_group()\n"
# What rank 0 puts into the store: its address, its public key, and the job's key, encrypted for one rank
SEALED = re.compile(rb"mscomm1,tcp,[0-9.]+,\d+,[0-9a-f]{64},[0-9a-f]{96}")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_line_of_the_script_changes_and_not_the_weights(tmp_path: Path) -> None:
    """Each host has one rank: both backends add the same two numbers. With four ranks, gloo itself aborts in some runs.

    There is no key file: the job's key passes encrypted through torch's store.
    """
    theirs, ours = tmp_path / "gloo", tmp_path / "mscomm"
    for folder in (theirs, ours):
        folder.mkdir()
        script = SCRIPT.replace('init_process_group("gloo")', f'init_process_group("{folder.name}")')
        (folder / "train.py").write_text(script)
    for _ in range(5):  # gloo runs on one host, because it sometimes does not connect two; it may also abort at exit
        done = torchrun_on_this_host(2, theirs / "train.py", theirs)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    with Hosts(2, tmp_path) as hosts:
        capture = Capture(hosts)
        ends = torchrun(hosts, ours / "train.py", ours, per_host=1)
        seen = capture.stop()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert SEALED.search(seen)
    weights = {folder.name: [torch.load(folder / f"rank_{i}.pt") for i in range(2)] for folder in (theirs, ours)}
    for expected, got in zip(weights["gloo"], weights["mscomm"], strict=True):
        assert list(expected) == list(got)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, msg=f"{name}: {{}}".format)
