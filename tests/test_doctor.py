"""mscomm doctor: what it finds on this machine, what it says about made-up machines, and when it exits with 1."""

from __future__ import annotations

import json
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from certificates import PASSWORD, write_config
from devices import variables
from sessions import MSCOMM, clean_environment, invoke, run

import mscomm
from mscomm import _core
from mscomm.bootstrap import sealed_key
from mscomm.cli import doctor
from mscomm.cluster.cpus import cpu_quota

OPENMPI = "mpirun (Open MPI) 5.0.11\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n"


def examined(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run([*MSCOMM, "doctor", *words], 180, clean_environment(**env))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = examined("--json", "-n", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def value(report: dict[str, Any], section: str, what: str) -> str:
    (found,) = [finding["value"] for finding in report["sections"][section] if finding["what"] == what]
    return str(found)


# -- this machine


def test_a_sound_machine_has_no_faults(report: dict[str, Any]) -> None:
    assert (report["schema"], report["ranks"], report["faults"]) == (doctor.SCHEMA, 3, 0)
    assert list(report["sections"]) == list(doctor.sections(3, {}))
    assert all(findings for findings in report["sections"].values())


@pytest.mark.parametrize("over", doctor.SELF_TESTS)
def test_two_ranks_compute_over_each_carrier_and_the_time_is_told(report: dict[str, Any], over: str) -> None:
    said = value(report, "Self-test", f"2 ranks over {over}")
    assert re.fullmatch(r"the numbers are right; all_reduce of 8 B in \d+ us, 1 MiB in \d+ us", said)


def test_backends_that_are_not_here_say_why(report: dict[str, Any]) -> None:
    assert value(report, "Backends", "cpu") == "ready"
    assert "cannot open libcuda.so.1, NVIDIA's driver. Tried: " in value(report, "Backends", "nccl")
    assert "cannot open libhccl.so, CANN's HCCL. Tried: " in value(report, "Backends", "hccl")


def test_a_backend_that_is_not_here_is_one_line_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(env: dict[str, str], verbose: bool) -> dict[str, str]:
        return {finding.what: finding.value for finding in doctor.backends(env, verbose)}

    monkeypatch.setattr(doctor, "accelerator", lambda name: f"cannot open lib{name}.so. Tried: everywhere")
    short = said({}, False)
    assert short["nccl"] == short["hccl"] == "not installed (mscomm doctor -v shows where mscomm looked)"
    assert said({}, True)["nccl"] == "cannot open libnccl.so. Tried: everywhere"
    named = said({"MSCOMM_NCCL_LIBRARY": "/there/libnccl.so"}, False)  # nccl is asked for, so doctor shows details
    assert "Tried" in named["nccl"] and "Tried" not in named["hccl"]


@pytest.mark.parametrize(("backend", "what"), [("nccl", "CUDA 13.0"), ("hccl", "AscendCL 1.15.0")])
def test_a_backend_that_is_here_tells_its_libraries_and_devices(backend: str, what: str) -> None:
    find = "import os\nfrom mscomm.cli import doctor\nfor one in doctor.backends(os.environ, True): print(*one[:2])"
    done = run([sys.executable, "-c", find], env=clean_environment(**variables(backend)))
    (said,) = [line for line in done.stdout.splitlines() if line.startswith(backend)]
    assert re.search(r"lib[nh]ccl\.so.*; .*; 4 devices: 4 x .*; kernels on device 0: none", said) and what in said, said


def test_the_address_to_use_is_one_of_this_host(report: dict[str, Any]) -> None:
    chosen = value(report, "Network", "address to use").partition(" ")[0].rstrip(":")
    addresses = [f["value"] for f in report["sections"]["Network"] if f["what"] not in ("host name", "address to use")]
    assert chosen in " ".join(addresses).replace(",", " ").split()


def test_a_variable_that_makes_no_sense_is_a_fault_and_ends_with_1() -> None:
    """Without a terminal, each finding is one line."""
    done = examined("-n", "2", MSCOMM_TIMEOUT="soon", MS_NODE_TIMEOUT="5")
    assert done.returncode == 1
    assert re.search(
        r"^Memory: shared memory: (a tmpfs of its own|memfd), (huge|small) pages \(shmem_enabled: ", done.stdout, re.M
    )
    assert re.search(r"^Machine: open files: (\d+|no limit)$", done.stdout, re.M)
    assert "Environment: FAULT: MSCOMM_TIMEOUT: expected a number of seconds more than 0" in done.stdout
    assert "Environment: MS_NODE_TIMEOUT: 5" in done.stdout
    assert "marked FAULT above" in done.stderr


def test_under_a_launcher_it_says_which_and_by_what() -> None:
    command = [*MSCOMM, "run", "-n", "2", "-m", "mscomm", "doctor"]
    done = run(command, 180, clean_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1] Launchers: this process: started by mscomm run" in done.stdout
    assert re.search(r"^\[1\] Launchers: by the variables: MSCOMM_RANK=1 MSCOMM_WORLD_SIZE=2 ", done.stdout, re.M)


# -- made-up machines


def test_a_fault_of_any_section_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "sections", lambda ranks, env, verbose: {"Made up": lambda: iter([doctor.Finding("x", "y", True)])}
    )
    done = invoke(doctor.command)
    assert done.exit_code == 1
    assert "Made up: FAULT: x: y" in done.output and "1 fault, marked FAULT above" in done.output


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('[0] fine')", None),
        ("raise SystemExit('no good')", "exit code 1.*no good"),
        ("import time; time.sleep(1000)", "Timeout"),
    ],
)
def test_a_self_test_that_fails_is_a_fault(monkeypatch: pytest.MonkeyPatch, script: str, said: str | None) -> None:
    monkeypatch.setattr(doctor, "SELF_TEST_S", 0.5 if said == "Timeout" else 60)
    found = doctor.try_two_ranks("two", script, "arena")
    assert found.fault == (said is not None)
    assert said is None or re.search(said, found.value, re.S)


@pytest.mark.parametrize(
    ("said", "flavour", "version"),
    [
        (OPENMPI, "Open MPI", "5.0.11"),
        ("prterun (PRRTE) 3.0.13\n", "Open MPI", "3.0.13"),
        (MPICH, "MPICH", "5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.17 Build\n", "Intel MPI", "2021.17"),
        ("something else\n", "unknown", "something else"),
    ],
)
def test_an_mpirun_is_known_by_what_it_says(said: str, flavour: str, version: str) -> None:
    assert doctor.flavour_of(said) == (flavour, version)


@pytest.mark.parametrize(
    ("flavour", "ranks", "root", "flags"),
    [
        ("Open MPI", 8, True, "--allow-run-as-root --oversubscribe "),
        ("Open MPI", 8, False, "--oversubscribe "),
        ("Open MPI", 2, True, "--allow-run-as-root "),
        ("MPICH", 8, True, ""),
    ],
)
def test_the_mpirun_line_has_the_flags_that_this_machine_needs(
    flavour: str, ranks: int, root: bool, flags: str
) -> None:
    mpirun = doctor.Mpirun("/usr/bin/mpirun", flavour, "mpirun", "1")
    assert doctor.mpirun_line(mpirun, ranks, 2, root) == f"mpirun {flags}-n {ranks} {sys.executable} script.py"


def test_the_mpirun_on_path_and_the_one_beside_python_are_both_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in (("path", MPICH), ("prefix/bin", OPENMPI)):
        mpirun = tmp_path / folder / "mpirun"
        mpirun.parent.mkdir(parents=True)
        mpirun.write_text(f"#!/bin/sh\ncat <<'.'\n{text}.\n")
        mpirun.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    found = doctor.find_mpiruns({"PATH": f"{tmp_path}/path"})
    assert [(mpirun.flavour, mpirun.command) for mpirun in found] == [
        ("MPICH", "mpirun"),
        ("Open MPI", f"{tmp_path}/prefix/bin/mpirun"),
    ]


@pytest.mark.parametrize(
    ("ranks", "cpus", "omp", "said"),
    [
        (4, 2, None, "sets 1; under mpirun set it yourself"),
        (2, 8, None, "sets 4; under mpirun"),
        (4, 8, "2", "4 ranks x 2 threads = 8 on 8 CPUs"),
        (4, 8, "4,2", "4 ranks x 4 threads = 16 on 8 CPUs: slow; OMP_NUM_THREADS=2 fits"),
        (4, 1.5, "1", "4 ranks x 1 threads = 4 on 1.5 CPUs"),
        (4, 8, "all", "OMP_NUM_THREADS=all is not a number"),
    ],
)
def test_threads_times_ranks_is_compared_with_the_cpus(ranks: int, cpus: float, omp: str | None, said: str) -> None:
    assert doctor.threads(ranks, cpus, omp).endswith(said) or said in doctor.threads(ranks, cpus, omp)


def test_too_few_open_files_are_a_fault_with_the_command_that_helps() -> None:
    assert not doctor.descriptors(8, 1024, 4096).fault
    assert not doctor.descriptors(8, resource.RLIM_INFINITY, resource.RLIM_INFINITY).fault
    few = doctor.descriptors(300, 1024, 4096)
    assert few.fault and few.value.endswith("raise it here: ulimit -n 1264")
    assert "raise it as root" in doctor.descriptors(300, 1024, 1024).value


@pytest.mark.parametrize(
    ("mine", "files", "cpus"),
    [
        ("0::/", {}, float("inf")),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, float("inf")),
        # a job of Slurm or a scope of systemd, whose cgroup lies deeper than the limit
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000", "cpu.max": "800000 100000"}, 2.0),
        ("0::/a/b", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "200000 100000"}, 0.5),
        ("0::/a", {"unified/a/cpu.max": "300000 100000"}, 3.0),
        # a container in which the path of the host is not mounted, and a process outside its cgroup namespace
        ("0::/docker/0123", {"cpu.max": "100000 100000"}, 1.0),
        ("0::/../other", {"cpu.max": "100000 100000"}, 1.0),
        # version 1
        ("4:memory:/m\n3:cpu:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        (
            "3:cpu,cpuacct:/",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            float("inf"),
        ),
        ("3:cpu,cpuacct:/a", {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "20000"}, 2.5),
    ],
)
def test_the_quota_of_a_control_group_is_read(mine: str, files: dict[str, str], cpus: float, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text(mine)
    for name, text in files.items():
        file = tmp_path / "mounted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert cpu_quota(str(tmp_path / "mounted"), str(tmp_path / "mine")) == cpus


def test_the_memory_says_how_to_get_huge_pages_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    small = "memfd, small pages (shmem_enabled: never; a user namespace: No space left on device)"
    monkeypatch.setattr(_core, "describe_memory", lambda wanted: small)
    assert re.fullmatch(rf"{re.escape(small)}; .*: echo advise > \S+ \(as root\)", doctor.shared_memory({}).value)
    monkeypatch.setattr(_core, "describe_memory", lambda wanted: "memfd, huge pages (shmem_enabled: advise)")
    assert doctor.shared_memory({}) == ("shared memory", "memfd, huge pages (shmem_enabled: advise)", False)

    def refused(wanted: bool) -> str:
        raise mscomm.Error("memfd_create: Operation not permitted")

    monkeypatch.setattr(_core, "describe_memory", refused)
    assert doctor.shared_memory({}).fault and "cannot share memory here" in doctor.shared_memory({}).value


LOOPBACK = {"127.0.0.1": "lo"}


def test_the_address_is_that_of_the_way_to_the_scheduler() -> None:
    found = doctor.address({"MS_SCHED_HOST": "127.0.0.1"}, LOOPBACK)
    assert (found.value, found.fault) == ("127.0.0.1 (lo), the way to MS_SCHED_HOST=127.0.0.1", False)


def test_an_address_that_this_host_has_not_is_a_fault() -> None:
    assert doctor.address({"MS_WORKER_IP": "127.0.0.1"}, LOOPBACK).value == "127.0.0.1 (lo), by MS_WORKER_IP"
    wrong = doctor.address({"MS_WORKER_IP": "203.0.113.7"}, LOOPBACK)
    assert wrong.fault and "no interface of this host has it" in wrong.value


def test_a_scheduler_that_has_no_address_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = doctor.address({"MS_SCHED_HOST": "nowhere"}, LOOPBACK)
    assert found.fault and found.value == "MS_SCHED_HOST=nowhere: Name or service not known"


def test_a_host_without_a_way_out_uses_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(host: str) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(doctor, "route_to", unreachable)
    found = doctor.address({}, LOOPBACK)
    assert not found.fault and found.value.startswith("127.0.0.1: no route leaves this host")


def test_a_package_that_is_not_there_says_what_it_would_be_for() -> None:
    assert doctor.optional("no-such-package", "dreams").value == "not installed; needed only for dreams"
    assert doctor.version("no_such_package").fault


def protected(**variables: str) -> dict[str, tuple[str, bool]]:
    return {finding.what: (finding.value, finding.fault) for finding in doctor.protection(variables)}


def test_what_protects_a_job_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert protected()["several hosts"][0].startswith(
        "refused, except under `mscomm run --hosts`, mpirun and torchrun, which make a key;"
    )
    monkeypatch.setattr(sealed_key, "possible", lambda: False)
    without = protected()["several hosts"][0]
    assert "mpirun and torchrun after pip install 'cryptography>=42', which make a key;" in without
    key = tmp_path / "key"
    key.touch(0o600)
    found = protected(MSCOMM_JOB_KEY_FILE=str(key))
    assert found["job key"][1] and "holds 0 bytes" in found["job key"][0]
    assert found["several hosts"][0] == "fails, see above"
    key.write_bytes(bytes(range(32)))
    assert "only processes with the key join" in protected(MSCOMM_JOB_KEY_FILE=str(key))["several hosts"][0]


def test_the_certificates_that_a_job_would_use_are_read(tmp_path: Path) -> None:
    variables = {"MSCOMM_SSL_CONFIG_FILE": write_config(tmp_path), "MSCOMM_SSL_CLIENT_PASSWORD": PASSWORD}
    found = protected(**variables)
    assert found["certificates"] == (f"{variables['MSCOMM_SSL_CONFIG_FILE']}: usable as a worker", False)
    assert "all TCP connections are encrypted" in found["several hosts"][0]
    found = protected(MSCOMM_SSL_CONFIG_FILE=variables["MSCOMM_SSL_CONFIG_FILE"])
    assert found["certificates"][1] and found["several hosts"][0] == "fails, see above"
    assert PASSWORD not in str(found)
