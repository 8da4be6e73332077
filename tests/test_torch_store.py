"""torchrun on several hosts without a key file: rank 0 makes a key, which goes through the store of torch's agents."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from control import soon
from hosts import Hosts
from test_hosts import finished, new_key
from test_tls_jobs import BODY, MARKER, Capture

from mscomm import errors
from mscomm.bootstrap.invitation import Seat
from mscomm.cluster.deadline import Deadline

torch_distributed = pytest.importorskip("torch.distributed")

from mscomm.bootstrap.torch_store import TorchStore, connected  # noqa: E402

KEYS = """
from mscomm.cluster import security
made = security.new_key
def noted():
    with open({!r}, "ab") as file:
        file.write(key := made())
    return key
security.new_key = noted
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(2, tmp_path) as hosts:
        yield hosts


def torchrun(
    hosts: Hosts,
    script: Path,
    *words: str | Path,
    options: Sequence[str] = (),
    per_host: int = 2,
    static: bool = False,
    **env: str,
) -> list[tuple[int, str, str]]:
    """Run the script with the arguments `words` on two hosts. Return each agent's exit code and output."""
    program = shutil.which("torchrun", path=f"{sys.prefix}/bin")
    if not program:
        pytest.skip("no torchrun")
    where = f"{hosts[0].address}:29400"
    meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", where, "--rdzv_id", "a job"]
    agents = []
    for i, host in enumerate(hosts):
        own = ["--master_addr", hosts[0].address, "--master_port", "29400", "--node_rank", str(i)] if static else meet
        own = [*own, "--nproc_per_node", str(per_host), "--local_addr", host.address, *options]
        agents.append(host.start([program, "--nnodes", "2", *own, script, *words], env))
    return [finished(agent, timeout_s=120) for agent in agents]  # on a busy machine, importing torch takes long


@pytest.mark.parametrize("static", [False, True], ids=["c10d", "static"])
def test_torchrun_without_a_key_is_encrypted(two: Hosts, tmp_path: Path, static: bool) -> None:
    script = tmp_path / "job.py"
    again = "mscomm.init()\nmscomm.release()\nmscomm.init()"
    script.write_text(f"import mscomm\n{KEYS.format(str(tmp_path / 'keys'))}\n{again}\n{BODY}")
    capture = Capture(two)
    ends = torchrun(two, script, static=static)
    seen = capture.stop()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sorted(line for _, out, _ in ends for line in out.splitlines()) == [f"rank {rank} of 4" for rank in range(4)]
    assert len(seen) > 1_000_000 and MARKER not in seen and b"mscomm1,tcp," in seen
    keys = (tmp_path / "keys").read_bytes()
    assert len(keys) == 32  # the second job derives its key from that of the first
    assert keys not in seen and keys.hex().encode() not in seen
    warned = re.findall("its key passed encrypted through torch's store", "".join(err for _, _, err in ends))
    assert len(warned) == 1, ends


def test_ranks_that_are_started_again_get_a_new_key(two: Hosts, tmp_path: Path) -> None:
    """Rank 3 fails in the first start. Each agent may start its ranks again more than once until all agree."""
    script = tmp_path / "job.py"
    fails = f"""
import os
if mscomm.get_rank() == 3 and not os.path.exists({str(tmp_path / "failed")!r}):
    open({str(tmp_path / "failed")!r}, "w").close()
    os._exit(3)
"""
    script.write_text(f"import mscomm\n{KEYS.format(str(tmp_path / 'keys'))}\nmscomm.init()\n{fails}\n{BODY}")
    ends = torchrun(two, script, options=["--max_restarts", "4"])
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert {f"rank {rank} of 4" for rank in range(4)} == {line for _, out, _ in ends for line in out.splitlines()}
    keys = (tmp_path / "keys").read_bytes()
    made = [keys[at : at + 32] for at in range(0, len(keys), 32)]
    assert len(made) >= 2 and len(set(made)) == len(made)


def test_a_key_file_on_one_host_alone_ends_the_job(two: Hosts, tmp_path: Path) -> None:
    key, script = new_key(tmp_path / "job.key"), tmp_path / "job.py"
    script.write_text(
        f"import os\nif os.uname().nodename == 'host-1': os.environ['MSCOMM_JOB_KEY_FILE'] = {key!r}\n"
        "import mscomm\nmscomm.init()"
    )
    ends = torchrun(two, script, MS_TOPO_TIMEOUT="20")  # on a busy machine, importing torch takes long
    text = "".join(err for _, _, err in ends)
    assert all(code != 0 for code, _, _ in ends), ends
    assert re.search(r"rank \d has put nothing into torch's store .* or has a key file or certificates", text), text


class Agent:
    """The store of an agent in this process, and the ranks that use it."""

    def __init__(self) -> None:
        self.server = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def store(self, rank: int, size: int = 2) -> TorchStore:
        store = connected("torchrun", "127.0.0.1", self.server.port, soon())
        return TorchStore("torchrun", store, "mscomm/0", Seat(rank, size, 0, one_host=False))

    def start(self, text: str) -> str:
        """Let rank 1 ask with this text, and rank 0 answer. Return the answer. Rank 1 may begin before rank 0."""
        with ThreadPoolExecutor() as pool:
            asks = pool.submit(self.store(1).ask, text, soon())
            rank_0 = self.store(0)
            asked = rank_0.collect(soon(), wanted=True)
            rank_0.answer(["for rank 0", f"answer to {asked[0]}"], soon())
            return asks.result()


def test_entries_of_an_earlier_start_are_not_taken_for_new_ones() -> None:
    agent = Agent()
    assert [agent.start(text) for text in ("first", "second", "third")] == [
        f"answer to {text}" for text in ("first", "second", "third")
    ]


def test_a_rank_that_does_not_come_is_named() -> None:
    agent = Agent()
    with pytest.raises(errors.CollectiveTimeout, match=r"rank 1 has put nothing into torch's store at 127\.0\.0\.1"):
        agent.store(0).collect(Deadline(0.2), wanted=True)
    with pytest.raises(errors.CollectiveTimeout, match="rank 0 has put no answer into torch's store"):
        agent.store(1).ask("text", Deadline(0.2))


def test_a_deadline_that_passes_while_torch_is_imported_is_told() -> None:
    with pytest.raises(errors.CollectiveTimeout, match="importing torch took longer than MS_TOPO_TIMEOUT"):
        connected("torchrun", "127.0.0.1", 1, Deadline(1e-9))


def test_a_store_that_cannot_be_reached_is_named(port: int) -> None:
    with pytest.raises(errors.BackendUnavailable, match=rf"torch's store at 127\.0\.0\.1, port {port}: "):
        connected("torchrun", "127.0.0.1", port, Deadline(1))
