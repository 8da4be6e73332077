"""The stand-ins for AscendCL and HCCL keep the promises of fakes/README.md."""

from __future__ import annotations

import signal

import pytest
from fakes.build import ASCEND, build, compiler
from fakes.launch import launch, warm

VARIANTS = {
    "one library": ("acl", ("hccl",)),
    "split": ("acl", ("hccl-split", "hcomm")),
    "new runtime": ("acl-rt", ("hccl-split", "hcomm")),
}


@pytest.fixture(scope="module")
def paths():
    try:
        compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    return build(names=ASCEND)


@pytest.fixture(scope="module")
def warmed(paths):
    with warm("fakes.hccl_scenarios") as process:
        yield process


@pytest.fixture
def ranks(paths, warmed, tmp_path):
    """ranks(n, scenario, ...) runs the scenario in n processes. It returns a dict with the result of each rank."""

    def run(
        size, scenario, *, variant="one library", device_of=None, env=None, only=None, codes=None, clean=True, **more
    ):
        runtime, libraries = VARIANTS[variant]
        more |= {"acl": str(paths[runtime]), "hccl": [str(paths[one]) for one in libraries]}
        each = {"arguments_of": lambda rank: {"device": device_of(rank)}} if device_of else {}
        return launch(warmed, scenario, size, more, tmp_path, env=env, only=only, codes=codes, clean=clean, **each)

    return run


@pytest.mark.parametrize(
    ("size", "variant"), [(1, "one library"), (2, "split"), (3, "one library"), (3, "new runtime"), (4, "split")]
)
def test_bytes_move_in_each_collective(ranks, size, variant):
    assert set(map(tuple, ranks(size, "collectives", variant=variant).values())) == {()}


def test_where_the_functions_are(paths):
    one, split, hcomm = (paths[name].read_bytes() for name in ("hccl", "hccl-split", "hcomm"))
    for function in (b"HcclAllReduce\0", b"HcclBatchSendRecv\0"):
        assert function in one and function in split and function not in hcomm
    for function in (b"HcclCommInitRootInfo\0", b"HcclGetCommAsyncError\0"):
        assert function in one and function not in split and function in hcomm
    assert [paths[name].name for name in ASCEND] == [
        "libascendcl.so",
        "libacl_rt.so",
        "libhccl.so",
        "libhccl.so",
        "libhcomm.so",
    ]


def test_types_and_operators_of_a2(ranks):
    for found in ranks(2, "reductions").values():
        taken = {"int8", "int16", "int32", "int64", "float16", "float32", "bfloat16"}
        for name, value in found.items():
            if " " not in name or name == "no bfloat16":
                continue
            dtype, op = name.split()
            refused = dtype not in taken or (op == "prod" and dtype in ("int16", "bfloat16"))
            assert value == (5 if refused else "right"), (name, value)
        assert (found["no bfloat16"], found["fp8"]) == (0, 5)


def test_types_and_operators_of_910(ranks):
    for found in ranks(1, "reductions", env={"FAKE_ASCEND": "910"}).values():
        assert (found["bfloat16 sum"], found["no bfloat16"], found["int16 sum"], found["uint8 max"]) == (5, 5, 5, 5)
        assert found["int64 prod"] == found["float16 sum"] == "right"


@pytest.mark.parametrize(
    ("size", "first", "code"), [(1, 0, 0), (2, 0, 0), (3, 0, 1), (2, 3, 1), (2, 4, 0)], ids=lambda value: str(value)
)
def test_rank_counts_of_910(ranks, size, first, code):
    env = {"FAKE_ASCEND": "910", "FAKE_DEVICES": "8"}
    values = ranks(size, "init_code", device_of=lambda rank: first + rank, env=env, clean=False)
    assert {value for value, _ in values.values()} == {code}


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({}, 7),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, 0),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "auto", "FAKE_ASCEND": "910"}, 7),
    ],
)
def test_one_device_twice(ranks, env, code):
    assert set(ranks(2, "init_code", device=0, env=env).values()) == {code}


def test_a_missing_rank_is_a_timeout(ranks):
    assert ranks(2, "init_code", only=[0], env={"FAKE_CONNECT_TIMEOUT_MS": "300"}) == {0: 9}


def test_the_runtime(ranks):
    assert ranks(1, "runtime", clean=False)[0][0] == {
        "twice": 100002,
        "device": 107001,
        "stream": [1, 0],
        "event": [0, 1],
        "timeout": 507046,
        "value": 1.0,
        "room": 100000,
        "kind": 107000,
        "no interface": True,
        "elsewhere": 107003,
        "context": 0,
    }


def test_disagreement_hangs_until_suspended(ranks):
    for value in ranks(2, "hang", what="count").values():
        assert value == {
            "first": [0, 0],
            "waited": 507046,
            "state": 0,
            "after": 0,
            "later": 22,
        }


@pytest.mark.parametrize("remote", [False, True])
def test_a_killed_rank(ranks, remote):
    env = {"FAKE_DIE": "all_reduce:2@1", "FAKE_REMOTE_ERROR": str(int(remote))}
    value = ranks(2, "hang", what="remote" if remote else "", env=env, codes={1: -signal.SIGKILL})[0]
    assert (value["waited"], value["state"], value["after"]) == (507046, 21 if remote else 0, 0)


def test_injections(ranks):
    assert ranks(1, "injected", env={"FAKE_FAIL": "all_reduce:2:9"})[0] == {"codes": [0, 9], "state": 0, "waited": 0}
    late = ranks(1, "injected", env={"FAKE_ASYNC_FAIL": "all_reduce:2:21"}, until_error=True)[0]
    assert late == {"codes": [0, 0], "state": 21, "waited": 507046}
    assert ranks(1, "injected", env={"FAKE_HANG": "all_reduce:2"})[0] == {"codes": [0, 0], "state": 0, "waited": 507046}
