"""torchrun on two hosts: a script of PyTorch's DistributedDataParallel trains over mscomm what it trains over gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hosts import Hosts
from test_tls_jobs import Capture
from test_torch_store import torchrun

torch = pytest.importorskip("torch")
if not hasattr(torch.distributed, "all_gather_single"):
    pytest.skip("needs torch.distributed of PyTorch 2.13 or later", allow_module_level=True)

SCRIPT = Path(__file__).with_name("ddp_script.py").read_text()
# What rank 0 puts into the store: its address, its public key, and the job's key, encrypted for one rank
SEALED = re.compile(rb"mscomm1,tcp,[0-9.]+,\d+,[0-9a-f]{64},[0-9a-f]{96}")
# With 2 ranks, both backends add the same two numbers. With more ranks, they add in different orders.
LIMITS = {2: {"rtol": 0, "atol": 0}, 4: {"rtol": 1e-3, "atol": 1e-4}}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [2, 4])
def test_one_line_of_the_script_changes_and_not_the_weights(size: int, tmp_path: Path) -> None:
    """There is no key file: the job's key passes encrypted through torch's store."""
    weights = {}
    for backend in ("gloo", "mscomm"):
        folder = tmp_path / backend
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(SCRIPT.replace('init_process_group("gloo")', f'init_process_group("{backend}")'))
        with Hosts(2, tmp_path) as hosts:
            capture = Capture(hosts)
            ends = torchrun(hosts, script, folder, per_host=size // 2, GLOO_SOCKET_IFNAME="net0")
            seen = capture.stop()
        assert [code for code, _, _ in ends] == [0, 0], ends
        assert bool(SEALED.search(seen)) == (backend == "mscomm")
        weights[backend] = [torch.load(folder / f"rank_{rank}.pt") for rank in range(size)]
    for theirs, ours in zip(weights["gloo"], weights["mscomm"], strict=True):
        assert list(theirs) == list(ours)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], **LIMITS[size], msg=f"{name}: {{}}".format)
