"""Which accelerator and device each rank uses, and what mscomm says if there is none.

Tests with @needs_nccl use the real NCCL from an installed wheel. Tests with @devices use stand-ins for the vendor
libraries.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import devices, on_device, variables
from fakes.device_array import DeviceArray
from ranks import before_joining

import mscomm
from mscomm import accelerators, log

ROOT = Path(__file__).parent.parent


def is_installed(package: str) -> bool:
    return any(found.name == package for found in importlib.metadata.distributions())


WHEELS = [name for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if is_installed(name)]
needs_nccl = pytest.mark.skipif(not WHEELS, reason="no nvidia-nccl wheel is installed")
NAMES = ["rank 0 (pid 1 on host a)", "rank 1 (pid 2 on host a)", "rank 2 (pid 3 on host b)"]


def told(uuids: str = "AB", version: str = "2.28.9", shares: str = "", device: int | None = None, **more: Any) -> Any:
    """Return what a rank reports about nccl. `uuids` has one letter for each device of the rank."""
    found = {"version": version, "path": "/lib/libnccl.so.2", "runtime": "CUDA 13.0", "shares": shares}
    found["devices"] = [[f"GPU-{letter}", "H100"] for letter in uuids]
    return {"device": device, "local_rank": None, "plain_device": 0, "accelerators": {"nccl": found}, **more}


def test_where_nobody_asked_for_it_a_line_says_why_it_is_missing() -> None:
    for name, told in accelerators.facts("auto", None, None, {})["accelerators"].items():
        assert len(told["missing"]) < 100 and "cannot open" in told["missing"], name
        assert told["missing"] in accelerators.facts(name, None, None, {})["accelerators"][name]["missing"]


def without(why: str) -> Any:
    return {
        "device": None,
        "local_rank": None,
        "plain_device": 0,
        "accelerators": {"nccl": {"missing": why}, "hccl": {"missing": "no CANN"}},
    }


# -- which backend and devices the ranks choose, from what all ranks report


def test_devices_whose_traffic_is_plain_need_permission_in_a_job_with_tls() -> None:
    facts = [told("A"), told("B"), told("C")]
    with pytest.raises(mscomm.BackendUnavailable, match="nccl cannot use TLS across hosts: its traffic is plain"):
        accelerators.choose("nccl", facts, [0, 0, 1], NAMES, tls=True)
    chosen = accelerators.choose("auto", [fact | without("")["accelerators"] for fact in facts], [0, 0, 1], NAMES, True)
    assert chosen.backend == "cpu" and "MSCOMM_ALLOW_PLAIN_DEVICE=1 on every rank" in chosen.reason
    facts[:2] = [fact | {"plain_device": 1} for fact in facts[:2]]
    with pytest.raises(mscomm.BackendUnavailable):
        accelerators.choose("nccl", facts, [0, 0, 1], NAMES, tls=True)
    facts[2]["plain_device"] = 1
    assert accelerators.choose("nccl", facts, [0, 0, 1], NAMES, tls=True).backend == "nccl"
    assert accelerators.choose("nccl", [told("A"), told("B")], [0, 0], NAMES, tls=True).backend == "nccl"


def test_each_rank_takes_the_device_of_its_place_on_its_host() -> None:
    chosen = accelerators.choose("nccl", [told(), told(), told()], [0, 0, 1], NAMES)
    assert chosen == ("nccl", [0, 1, 0], "asked for")


def test_the_launchers_local_rank_counts_and_what_the_user_says_counts_more() -> None:
    facts = [told("ABC", local_rank=2), told("ABC", local_rank=0), told("ABC", device=1)]
    assert accelerators.choose("nccl", facts, [0, 0, 0], NAMES).devices == [2, 0, 1]


def test_a_launcher_may_show_each_rank_one_device_alone() -> None:
    facts = [told("A", local_rank=0), told("B", local_rank=1)]
    assert accelerators.choose("nccl", facts, [0, 0], NAMES).devices == [0, 0]


def test_one_device_of_two_ranks_names_both_and_it() -> None:
    message = "rank 0 .* and rank 1 .* would share one device, H100 .GPU-A.. Start at most as many ranks on a host"
    with pytest.raises(mscomm.BackendUnavailable, match=message):
        accelerators.choose("nccl", [told("A"), told("A"), told("A")], [0, 0, 1], NAMES)


def test_ranks_that_count_as_those_of_several_hosts_may_share_a_device() -> None:
    facts = [told("A", shares="one"), told("A", shares="two"), told("A", shares="two")]
    assert accelerators.choose("nccl", facts, [0, 0, 1], NAMES).devices == [0, 0, 0]
    with pytest.raises(mscomm.BackendUnavailable, match=r"rank 1 .* and rank 2 .* would share"):
        accelerators.choose("nccl", facts, [0, 0, 0], NAMES)


def test_different_versions_are_told_with_their_files() -> None:
    facts = [told(), told(), told(version="2.18.3")]
    with pytest.raises(
        mscomm.Mismatch, match=r"rank 0 .*, rank 1 .*: 2.28.9 ./lib/libnccl.so.2.; on rank 2 .*: 2.18.3"
    ) as e:
        accelerators.choose("nccl", facts, [0, 0, 1], NAMES)
    assert e.value.ranks == (2,) and "MSCOMM_NCCL_LIBRARY" in str(e.value)


def test_who_lacks_it_is_named_with_the_reason_each_once() -> None:
    facts = [without("no driver"), told(), without("no driver")]
    message = re.escape(f"nccl cannot be used, on {NAMES[0]}, {NAMES[2]}: no driver")
    with pytest.raises(mscomm.BackendUnavailable, match=f"^{message}$"):
        accelerators.choose("nccl", facts, [0, 0, 1], NAMES)


def test_what_all_ranks_lack_is_said_without_a_list_of_them() -> None:
    with pytest.raises(mscomm.BackendUnavailable, match=r"^nccl cannot be used, on all 3 ranks: no driver$"):
        accelerators.choose("nccl", [without("no driver")] * 3, [0, 0, 1], NAMES)


def test_a_device_that_is_not_there_names_the_rank() -> None:
    with pytest.raises(mscomm.BackendUnavailable, match=r"no such device, on rank 1 .*: device 7 of 2"):
        accelerators.choose("nccl", [told(), told(device=7)], [0, 0], NAMES)
    with pytest.raises(mscomm.BackendUnavailable, match=r"no such device, on rank 1 .*: device -1 of 2"):
        accelerators.choose("nccl", [told(), told(device=-1)], [0, 0], NAMES)


def test_without_a_name_the_first_that_all_ranks_can_use_counts() -> None:
    hccl = {"hccl": {"missing": "no CANN"}}
    able = told()
    able["accelerators"] |= hccl
    assert accelerators.choose("auto", [able, able], [0, 0], NAMES).backend == "nccl"
    chosen = accelerators.choose("auto", [able, without("no driver")], [0, 0], NAMES)
    assert chosen.backend == "cpu" and chosen.devices == [-1, -1]
    assert "no driver" in chosen.reason and "no CANN" in chosen.reason
    assert (
        accelerators.choose("auto", [able, able, able], [0, 0, 0], NAMES).backend == "cpu"
    )  # the host has three ranks, but only two devices
    assert accelerators.choose("cpu", [able], [0], NAMES).backend == "cpu"


# -- finding and opening NCCL and CUDA


def refusal(env: dict[str, str]) -> str:
    """Return the text of the error that init('nccl') raises in a new process with this environment. A library that
    init() has opened stays in its process, where another test would find it.
    """
    program = "import mscomm\ntry: mscomm.init('nccl')\nexcept mscomm.BackendUnavailable as e: print(e)"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["MSCOMM_NCCL_LIBRARY", "MSCOMM_CUDA_LIBRARY"])
def test_a_file_that_the_user_names_is_the_only_one_that_is_tried(name: str, tmp_path: Path) -> None:
    text = refusal({**os.environ, **variables(), name: str(tmp_path / "none.so")})
    assert f"Tried: {name}: {tmp_path}/none.so: cannot open shared object file" in text
    assert "the loader's path" not in text


def test_a_file_that_is_another_library_lacks_functions() -> None:
    libraries = variables()
    text = refusal({**os.environ, **libraries, "MSCOMM_NCCL_LIBRARY": libraries["MSCOMM_CUDA_LIBRARY"]})
    assert re.search(r"libcuda.so.1 .* has no function ncclGetVersion: it is too old, or", text), text


def test_what_is_missing_is_said_with_every_place_that_was_searched() -> None:
    env = {name: text for name, text in os.environ.items() if not name.startswith(("MSCOMM_", "NCCL_", "FAKE_"))}
    text = refusal({**env, "CONDA_PREFIX": "/no/conda", "NCCL_HOME": "/no/home", "CUDA_VISIBLE_DEVICES": ""})
    expected = [
        "nccl cannot be used, on rank 0",
        "cannot open libcuda.so.1, NVIDIA's driver. Tried: in this process: it is not",
        "; the loader's path: ",
        'Without a GPU, use init("gloo"), which runs on the CPU',
    ]
    if not WHEELS:
        expected += [
            "cannot open libnccl.so.2",
            "site-packages: ",
            "CONDA_PREFIX: /no/conda/lib",
            "NCCL_HOME: /no/home/lib64",
        ]
    for words in expected:
        assert words in text, text


def test_a_driver_without_a_gpu_says_so() -> None:
    text = refusal({**os.environ, **variables(FAKE_DEVICES="0")})
    assert "finds no GPU: CUDA_ERROR_NO_DEVICE (100)" in text, text


@needs_nccl
def test_the_real_nccl_of_its_wheel_is_found_and_tells_its_version() -> None:
    """Run in a new process, because this process may already have loaded another NCCL."""
    program = (
        "from mscomm.accelerators import nccl\nvendor = nccl.vendor({})\n"
        "print(vendor.version(), vendor.origin(), vendor.path())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    version, origin, path = done.stdout.split()
    assert (version, origin) == (importlib.metadata.version(WHEELS[0]), "site-packages")
    assert path.endswith("site-packages/nvidia/nccl/lib/libnccl.so.2")


@needs_nccl
def test_our_declarations_are_those_of_the_real_header(tmp_path: Path) -> None:
    """Compile a file in which static_asserts compare our sizes, offsets and constants with those of nccl.h."""
    (include,) = (Path(path) / "nccl/include" for path in importlib.util.find_spec("nvidia").submodule_search_locations)
    (tmp_path / "cuda_runtime.h").write_text(
        "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"
    )
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "library_types.h"):
        (tmp_path / name).touch()
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++20",
        "-fsyntax-only",
        f"-I{tmp_path}",
        f"-I{include}",
        f"-I{ROOT}/csrc",
    ]
    done = subprocess.run([*command, ROOT / "tests/core/nccl_abi.cc"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- init()


@devices(3, init=None)
def test_init_without_a_name_takes_the_devices_where_every_rank_has_one(rank: int) -> None:
    mscomm.init()
    assert mscomm.get_backend() == "nccl"
    mscomm.init()
    mscomm.init("nccl")
    with pytest.raises(RuntimeError, match=r'init."gloo".: this process has joined with backend nccl'):
        mscomm.init("gloo")
    assert (mscomm.all_reduce(on_device(np.ones(2))).to_numpy() == 3).all()


@devices(3, env={"FAKE_DEVICES": "2"}, init=None)
def test_init_without_a_name_takes_the_cpu_where_one_rank_has_none(rank: int) -> None:
    mscomm.init()
    assert mscomm.get_backend() == "cpu"
    assert (mscomm.all_reduce(np.ones(2)) == 3).all()


@devices(2, env={"FAKE_DEVICES": "1"}, init=None)
def test_a_device_target_is_taken_at_its_word(rank: int) -> None:
    mscomm.set_context(device_target="GPU")
    with pytest.raises(mscomm.BackendUnavailable, match=r"rank 0 .* and rank 1 .* would share one device"):
        mscomm.init()
    assert not mscomm.is_initialized()


@devices(2, init=None)
def test_the_cpu_as_device_target_leaves_the_devices_alone(rank: int) -> None:
    mscomm.set_context(device_target="CPU")
    mscomm.init()
    assert mscomm.get_backend() == "cpu"


@devices(2, init=None)
def test_each_rank_can_name_its_device(rank: int) -> None:
    mscomm.set_context(device_id=3)
    mscomm.init("nccl", device=3 - rank if rank else None)
    x = DeviceArray.from_numpy(np.ones(2), device=3 - rank)
    assert (mscomm.all_reduce(x).to_numpy() == 2).all()


@devices(2, env=lambda rank: {"LIBRARY": ["nccl-22809", "nccl-21803"][rank]}, init=None)
def test_different_versions_are_an_error_on_all_ranks(rank: int) -> None:
    with pytest.raises(
        mscomm.Mismatch, match=r"different versions of nccl, on rank 0 .*: 2.28.9 .*; on rank 1 .*: 2.18.3"
    ):
        mscomm.init("nccl")


@devices(2, env=lambda rank: {"MSCOMM_CUDA_LIBRARY": "/none.so"} if rank else {}, init=None)
def test_a_rank_without_a_driver_is_an_error_on_all_ranks_at_once(rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(mscomm.BackendUnavailable, match=r"nccl cannot be used, on rank 1 .*: cannot open libcuda.so.1"):
        mscomm.init("nccl")
    assert time.monotonic() - began < 60  # not after the 120 s of the test's hub: the error comes when all have joined


@pytest.mark.parametrize(("code", "version"), [("21803", "2.18.3"), ("22809", "2.28.9"), ("23203", "2.32.3")])
@devices(2, env={"LIBRARY": "nccl-{code}"})
def test_every_version_of_nccl_works(rank: int, group: None, code: str, version: str) -> None:
    assert accelerators.opened("nccl").vendor.version() == version
    assert (mscomm.all_reduce(on_device(np.ones(2))).to_numpy() == 2).all()
    assert (mscomm.all_to_all(on_device(np.arange(2) + 2 * rank)).to_numpy() == [rank, 2 + rank]).all()


@devices(2, env={"FAKE_DEVICES": "1", "NCCL_HOSTID": "host-{rank}"}, init={"backend_name": "nccl", "device": 0})
def test_two_ranks_share_a_device_if_nccl_takes_them_for_two_hosts(rank: int, group: None) -> None:
    x = DeviceArray.from_numpy(np.ones(2), device=0)
    assert (mscomm.all_reduce(x).to_numpy() == 2).all()


# -- the environment variables that mscomm sets for NCCL and HCCL


def test_the_libraries_are_told_the_interface_that_the_job_has_found() -> None:
    env: dict[str, str] = {"PATH": "/bin"}
    told = accelerators.set_up("nccl", "eth7", env)
    assert told == {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "NCCL_RUNTIME_CONNECT": "0", "NCCL_SOCKET_IFNAME": "=eth7"}
    assert env["NCCL_SOCKET_IFNAME"] == "=eth7" and env["PATH"] == "/bin"
    assert accelerators.set_up("hccl", "eth7", env) == {"HCCL_SOCKET_IFNAME": "=eth7"}


def test_what_the_user_has_set_stays() -> None:
    env = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_LAUNCH_ORDER_IMPLICIT": "0", "NCCL_RUNTIME_CONNECT": "1"}
    assert accelerators.set_up("nccl", "eth7", env) == {} and env["NCCL_SOCKET_IFNAME"] == "ib0"


def test_on_one_host_nothing_listens_for_others() -> None:
    assert accelerators.set_up("nccl", None, {})["NCCL_SOCKET_IFNAME"] == "lo"
    assert accelerators.set_up("hccl", None, {}) == {}


WARNINGS: list[str] = []


def _hold_warnings() -> None:
    if "NCCL_COMM_BLOCKING" in os.environ:
        log.warn = WARNINGS.append


before_joining.append(_hold_warnings)


@devices(2, env={"NCCL_COMM_BLOCKING": "1"})
def test_rank_0_warns_of_a_variable_that_takes_away_the_time_limits(rank: int, group: None) -> None:
    assert (mscomm.all_reduce(on_device(np.ones(2))).to_numpy() == 2).all()
    assert len([text for text in WARNINGS if "NCCL_COMM_BLOCKING=1 takes away the time limits" in text]) == (rank == 0)


@devices(2, env={"MSCOMM_HOST_ID": "host-{rank}", "NCCL_HOSTID": "host-{rank}"})
def test_over_several_hosts_the_device_of_each_is_its_first(rank: int, group: None) -> None:
    x = DeviceArray.from_numpy(np.ones(2, np.float32), device=0)
    assert (mscomm.all_reduce(x).to_numpy() == 2).all()


def test_the_rank_table_says_which_device_a_rank_has(tmp_path: Path) -> None:
    """The table assigns devices 1 and 3 of the host to the two ranks."""
    devices = [{"device_id": str(2 * r + 1), "device_ip": f"192.1.27.{r + 6}", "rank_id": str(r)} for r in range(2)]
    server = {"server_id": "10.0.0.1", "device": devices, "host_nic_ip": "reserve", "note": str(tmp_path)}
    table = {"version": "1.0", "server_count": "1", "server_list": [server], "status": "completed"}
    (tmp_path / "table.json").write_text(json.dumps(table))
    program = (
        "import sys, mscomm, numpy as np; sys.path.insert(0, sys.argv[1])\n"
        "from fakes import library; library.register('hccl')\nfrom fakes.device_array import DeviceArray\n"
        "mscomm.init('hccl')\n"
        "x = DeviceArray.from_numpy(np.ones(2, np.float32), device=2 * mscomm.get_rank() + 1)\n"
        "print(mscomm.all_reduce(x).to_numpy())"
    )
    env = {**os.environ, **variables("hccl"), "RANK_TABLE_FILE": str(tmp_path / "table.json"), "RANK_SIZE": "2"}
    command = [sys.executable, "-c", program, str(ROOT / "tests")]
    processes = [
        subprocess.Popen(
            command, env={**env, "RANK_ID": str(r), "DEVICE_ID": str(2 * r + 1)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["[2. 2.]\n", "[2. 2.]\n"]
