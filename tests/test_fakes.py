"""The stand-ins for CUDA and NCCL keep the promises of fakes/README.md, on which the tests of backends rely."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.build import CUDA, build, compiler
from fakes.launch import launch, warm
from fakes.nccl_calls import IN_PROGRESS, INVALID_USAGE, TYPES, Config, Nccl, UniqueId


@pytest.fixture(scope="module")
def paths():
    try:
        compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    return build(names=CUDA)


@pytest.fixture(scope="module")
def warmed(paths):
    with warm("fakes.scenarios") as process:
        yield process


@pytest.fixture
def ranks(paths, warmed, tmp_path):
    """ranks(n, scenario, ...) runs the scenario in n processes. It returns a dict with the result of each rank."""

    def run(
        size, scenario, *, nccl=("nccl",), env=None, per_rank=lambda rank: {}, only=None, codes=None, clean=True, **more
    ):
        library = Nccl(paths["nccl"])
        more |= {
            "cuda": str(paths["cuda"]),
            "nccl": [str(paths[one]) for one in nccl],
            "ids": [library.unique_id().hex() for _ in range(10)],
        }
        return launch(
            warmed,
            scenario,
            size,
            more,
            tmp_path,
            env=env,
            per_rank=per_rank,
            only=only,
            codes=codes,
            clean=clean,
        )

    return run


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_move_in_each_collective(ranks, size):
    for value in ranks(size, "collectives").values():
        assert value == {"bad": [], "version": 22809}


def test_messages_of_any_size_go_through_a_small_file(ranks):
    values = ranks(3, "collectives", env={"FAKE_CHUNK_KB": "4", "FAKE_DELAY_US": "0"}, count=50_001)
    assert [value["bad"] for value in values.values()] == [[], [], []]


@pytest.mark.parametrize("version", [21803, 23203])
def test_other_versions(ranks, paths, version):
    for value in ranks(2, "collectives", nccl=[f"nccl-{version}"]).values():
        assert value["bad"] == [] and value["version"] == version


def test_one_of_several_processes_builds_and_the_others_wait(tmp_path):
    compiler, log, folder = tmp_path / "compiler", tmp_path / "log", tmp_path / "builds"
    compiler.write_text(f"""#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
sleep 0.2
touch "$2"
""")
    compiler.chmod(0o755)
    code = f"from fakes.build import build; print(build({str(folder)!r}, ['hccl-split'])['hccl-split'])"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "CXX": str(compiler)}
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({process.communicate(timeout=100)[0] for process in started}) == 1
    assert [process.returncode for process in started] == [0, 0, 0]
    assert [path.name for path in folder.glob("*/**/*") if path.is_file()] == ["libhccl.so"]
    assert len(log.read_text().splitlines()) == 3  # two sources and a library


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match="need a C\\+\\+20 compiler"):
        compiler()


def test_names_are_the_real_ones(paths):
    for path, soname in ((paths["cuda"], "libcuda.so.1"), (paths["nccl"], "libnccl.so.2")):
        assert path.name == soname and soname.encode() + b"\0" in path.read_bytes()


@pytest.mark.parametrize("size", [1, 3])
def test_every_type_is_reduced_and_rounded(ranks, size):
    assert all(bad == [] for bad in ranks(size, "dtypes", env={"FAKE_DELAY_US": "0"}).values())


@pytest.mark.parametrize(("held", "delay"), [(True, 300), (False, 400_000)])
def test_nothing_is_there_before_the_stream(ranks, held, delay):
    for value in ranks(2, "is_late", env={"FAKE_DELAY_US": str(delay)}, held=held).values():
        assert value == {"early": False, "seen": 1.0 if held else None, "later": 2.0}


def test_another_stream_must_be_waited_for(ranks):
    for value in ranks(2, "late_producer").values():
        assert value == {"unordered": 0.0, "ordered": 2.0}


def test_the_host_cannot_read_device_memory(ranks):
    ranks(1, "reads_device_memory", codes={0: -signal.SIGSEGV})


def test_managed_memory_is_the_host_s_too_until_it_is_freed(ranks):
    assert ranks(1, "managed", freed=False)[0] == {
        "early": [1.0, 2.0, 3.0, 4.0, 5.0],
        "later": [2.0, 3.0, 4.0, 5.0, 6.0],
        "managed": 1,
        "inside": [-1, 0, 0, -1],
    }
    ranks(1, "managed", freed=True, codes={0: -signal.SIGSEGV})


def test_disagreement_hangs_until_abort(ranks):
    for value in ranks(2, "mismatches").values():
        assert value and all(value.values()), value


@pytest.mark.parametrize("remote", [False, True])
def test_a_killed_rank_hangs_the_others_until_abort(ranks, remote):
    values = ranks(
        3,
        "dies",
        env={"FAKE_DIE": "all_reduce:2@1", "FAKE_REMOTE_ERROR": str(int(remote))},
        codes={1: -signal.SIGKILL},
        remote=remote,
    )
    assert values[0] == values[2] == {"hung": True, "state": 6 if remote else 0, "free": True}


def test_a_rank_that_dies_while_the_device_works(ranks):
    values = ranks(2, "dies", env={"FAKE_DIE": "all_reduce:2:1@1"}, codes={1: -signal.SIGKILL})
    assert values[0] == {"hung": True, "state": 0, "free": True}


@pytest.mark.parametrize("polls", [2, 5])
def test_non_blocking_calls_are_polled(ranks, polls):
    for value in ranks(2, "non_blocking", env={"FAKE_IN_PROGRESS_POLLS": str(polls)}).values():
        assert value == {
            "first": 7,
            "too_soon": 4,
            "made": 0,
            "called": 7,
            "twice": 4,
            "enqueued": 0,
            "value": 2.0,
            "finalized": [7, 0],
        }


def test_a_missing_rank_hangs_init_until_abort(ranks):
    assert ranks(2, "somebody_is_missing", only=[0]) == {0: {"state": 7, "files": 1}}


def test_the_next_communicator_sweeps_what_killed_ranks_left(ranks, tmp_path):
    ranks(2, "somebody_is_missing", only=[0], killed=True, codes={0: -signal.SIGKILL}, clean=False)
    assert len(list(tmp_path.glob("mscomm-fake-*"))) == 1
    ranks(1, "init_codes")  # the helper `ranks` also checks that no file is left


@pytest.mark.parametrize("non_blocking", [False, True])
def test_one_device_twice_is_refused(ranks, non_blocking):
    for value in ranks(2, "init_codes", device=0, non_blocking=non_blocking).values():
        assert value["code"] == 5 and "Duplicate GPU" in value["text"]


def test_one_device_twice_as_on_two_hosts(ranks):
    values = ranks(2, "init_codes", device=0, per_rank=lambda rank: {"NCCL_HOSTID": f"host-{rank}"})
    assert [value["code"] for value in values.values()] == [0, 0]


@pytest.mark.parametrize(("version", "code"), [(22809, 5), (23203, 0)])
def test_one_device_twice_when_allowed(ranks, version, code):
    values = ranks(2, "init_codes", device=0, nccl=[f"nccl-{version}"], env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    assert [value["code"] for value in values.values()] == [code, code]


def test_versions_must_match(ranks):
    for value in ranks(2, "init_codes", nccl=["nccl-22809", "nccl-23203"]).values():
        assert value["code"] == 5 and re.search("Mismatched NCCL version.*22809.*23203|23203.*22809", value["text"])


@pytest.mark.parametrize("size", [2, 3])
def test_groups(ranks, size):
    for value in ranks(size, "groups").values():
        assert value == {
            "before": 0.0,
            "after": True,
            "all_to_all": True,
            "joined": True,
            "member": 4,
            "group": 4,
            "end_alone": 5,
            "to_itself": 5,
            "usable": 0,
        }


def test_an_exchange_without_a_group_deadlocks(ranks):
    assert all(value == {"hung": True, "free": True} for value in ranks(2, "exchange_without_group").values())


def test_one_thread_drives_all_ranks_in_groups(ranks):
    assert ranks(1, "together") == {0: [6.0, 6.0, 6.0]}


def test_injected_failure_of_a_call(ranks):
    values = ranks(2, "two_all_reduces", env={"FAKE_FAIL": "all_reduce:2:2@0"})
    assert values[0]["code"] == 2 and "injected" in values[0]["text"] and values[0]["done"]
    assert values[1]["code"] == 0 and not values[1]["done"] and values[1]["free"]


def test_injected_failure_later(ranks):
    values = ranks(2, "two_all_reduces", env={"FAKE_ASYNC_FAIL": "all_reduce:2:6"}, until_error=True)
    for value in values.values():
        assert (value["code"], value["done"], value["state"], value["free"]) == (0, False, 6, True)


def test_injected_hang(ranks):
    values = ranks(2, "two_all_reduces", env={"FAKE_HANG": "all_reduce:2@1"})
    for value in values.values():
        assert (value["code"], value["done"], value["state"], value["free"]) == (0, False, 0, True)


def test_injected_failure_of_init_and_of_a_group(ranks):
    assert ranks(1, "init_codes", env={"FAKE_FAIL": "init:1:3"})[0]["code"] == 3
    assert ranks(1, "init_codes", env={"FAKE_DEVICES": "1", "FAKE_FAIL": "init:2:3"})[0]["code"] == 0


def test_configurations_are_checked(ranks):
    values = ranks(1, "configurations", clean=False)
    found, counters = values[0]
    assert found == {
        "good": 0,
        "magic": 4,
        "header": 4,
        "blocking": 4,
        "ctas": 4,
        "zero": 4,
        "old": 0,
        "later": 0,
    }
    assert counters["violations"] == {"config": 1}


def test_two_communicators_in_different_orders(ranks):
    assert set(ranks(2, "two_communicators", env={"FAKE_ONE_AT_A_TIME": "1"}).values()) == {False}


def test_several_communicators_in_one_group(ranks):
    assert all(value == [7, 3.0, 3.0, 3.0] for value in ranks(3, "grouped_communicators").values())


@pytest.mark.parametrize(
    ("what", "kind", "codes"),
    [
        ("freed", "use_after_free", [700, 1]),
        ("host", "wild_address", [700, 1]),
        ("too long", "out_of_bounds", [700, 1]),
        ("destroyed", "dead_comm", [4]),
        ("overlap", "overlap", [0, 0]),
        ("old symbol", "old_symbol", [1]),
        ("threads", "threads", [0, 0]),
        ("grouped", "threads", [0, 0]),
    ],
)
def test_misuse_is_told(ranks, what, kind, codes):
    value, counters = ranks(1, "misuse", what=what, clean=False, settle=False)[0]
    assert value == codes
    assert set(counters["violations"]) == {kind}


def test_arrays_by_dlpack(ranks):
    assert ranks(1, "dlpack")[0] == {
        "device": [2, 0],
        "told": [True, 2, 2, 4, 16, 1],
        "layout": [3, 2, 4, 2],
        "held": [1, 0],
        "major": 1,
        "ordered": 1.0,
    }


def real_header() -> Path | None:
    """Return the path of nccl.h: the value of MSCOMM_TEST_NCCL_HEADER, or the file in an installed wheel. If there is
    no such file, return None.
    """
    named = os.environ.get("MSCOMM_TEST_NCCL_HEADER")
    places = [Path(named)] if named else [Path(one) / "nvidia/nccl/include/nccl.h" for one in sys.path]
    return next((place for place in places if place.exists()), None)


@pytest.mark.skipif(real_header() is None, reason="no nccl.h: install nvidia-nccl-cu12 or set MSCOMM_TEST_NCCL_HEADER")
def test_numbers_and_layouts_are_those_of_the_real_header(tmp_path):
    header = real_header()
    text = header.read_text()
    (tmp_path / "cuda_runtime.h").write_text(
        "#include <stddef.h>\n#include <stdint.h>\ntypedef struct S* cudaStream_t; typedef struct E* cudaEvent_t;\n"
    )
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        (tmp_path / name).write_text("")
    (tmp_path / "nccl.h").write_text(text)
    size = int(re.search(r"NCCL_VERSION_CODE (\d+)", text)[1]) if re.search(r"NCCL_VERSION_CODE (\d+)", text) else 0
    fields = [name for name, *_ in Config._fields_ if name not in ("later",) and re.search(rf"\b{name};", text)]
    checks = [f"offsetof(ncclConfig_t, {name}) == {getattr(Config, name).offset}" for name in fields]
    checks += [f"sizeof(ncclUniqueId) == {ctypes.sizeof(UniqueId)}", f"NCCL_VERSION_CODE == {size}"]
    checks += [f"ncclInProgress == {IN_PROGRESS}", f"ncclInvalidUsage == {INVALID_USAGE}", "ncclAvg == 4"]
    checks += [f"ncclBfloat16 == {TYPES['bfloat16']}", f"ncclFloat64 == {TYPES['float64']}", "ncclRemoteError == 6"]
    source = tmp_path / "check.cc"
    asserts = "\n".join(f"static_assert({check});" for check in checks)
    source.write_text(f"#include <climits>\n#include <cstddef>\n#include <nccl.h>\n{asserts}\n")
    command = [*compiler(), "-std=c++20", "-fsyntax-only", f"-I{tmp_path}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(fields) > 8


def test_a_graph_is_launched_again(ranks):
    for value in ranks(2, "captured").values():
        assert value == {"status": 1, "refused": [900, 900], "before": 1.0, "after": 8.0}


def test_the_driver(ranks):
    assert ranks(1, "driver", clean=False)[0][0] == {
        "no context": 201,
        "no stream": 400,
        "no event": 400,
        "no device": 101,
        "no context there": 201,
        "kernel": 209,
        "library": 209,
        "bad free": 1,
        "kind": [0, 2],
        "ordinal": [0, 0],
        "start": [0, True],
        "host": 1,
        "unrecorded": 0,
        "recorded": 600,
        "side": 600,
        "then": 0,
        "beside": 0.0,
        "legacy": 1.0,
        "own": 2.0,
        "forked": 3,
    }


def test_no_device(ranks, paths):
    code = f"import ctypes; print(ctypes.CDLL({str(paths['cuda'])!r}).cuInit(0))"
    environ = os.environ | {"FAKE_DEVICES": "0"}
    assert subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True).stdout == "100\n"


def test_arrays(ranks):
    value = ranks(1, "arrays")[0]
    assert value == {
        "bad": [],
        "strides": [[160, 20, 4], None],
        "stream": [True, 1],
        "typestr": ["<i4", "<V2"],
        "fill": [1.0, 7.0],
    }
