"""Measures the tests: plants the faults of faults.py, one at a time, and runs the tests that should find each.

    .venv/bin/python tests/planted/run.py [NAMES...] [--only-first] [--table FILE] [--from FILE]

The tests run in build/planted/env. It has links to the files of .venv, which `make .venv/.dev` makes, but a copy of
mscomm with the fault. So neither the sources nor .venv change, and the processes that the tests start have the fault,
except the few ranks that run in .venv-mpich. A fault in C++ is planted in build/planted/source, and only what depends
on it is built again.

First the tests in the fault's row run. If they pass, all Python tests of its tier run, too. A test of the tier that
fails also runs without the fault, where it must pass. If the tests take longer than the limit, something hangs, so the
fault is found. All of a run's tests have one MSCOMM_TEST_SEED, which the table names.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from faults import FAULTS, Fault

from mscomm import _core

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import promises  # noqa: E402
import rotated  # noqa: E402

ROOT = HERE.parent.parent
VENV = ROOT / ".venv"
BUILD = ROOT / "build/planted"
ENV, SOURCE, LOG = (BUILD / name for name in ("env", "source", "log"))
BIN = ENV / "bin"
# What chooses all Python tests of a tier. The tier "core" is the C++ tests.
CHOOSING: Mapping[str, Sequence[str]] = {
    "check": list(promises.QUICK),
    "test": [""],
    "test-all": ["", "-m", "not huge"],
}
PYTEST = ("-m", "pytest", "-q", "-x", "-n", "3", "--dist", "loadfile")  # three tests at once, as in the Makefile
BUILD_LIMIT_S, ROW_LIMIT_S, TIER_LIMIT_S = 3600, 900, 5400
MARK = "MSCOMM_TEST_PLANTED"  # all processes of a command inherit this variable
OF_TESTS = ("PYTHON=OFF", "TESTS=ON", "SANITIZE=address", "CUDA_KERNELS=OFF")
TITLE = """# Which tests find the planted faults

tests/planted/run.py has written this file. The last column is the time in seconds to plant the fault, to build what
depends on it, and to run its tests."""
AREAS = ("csrc", "src", "cluster", "train", "parallel")


def execute(command: Sequence[str | Path], limit_s: float, cwd: Path = ROOT) -> tuple[int | None, str]:
    """Run a command. Return its exit code, or None if it hangs, and its output. Kill all processes that it leaves."""
    mark = secrets.token_hex(8)
    env = {**os.environ, rotated.SEED: rotated.seed(), MARK: mark, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    if (mpich := ROOT / ".venv-mpich").exists():
        env["MSCOMM_TEST_MPICH"] = str(mpich)
    code = None
    with open(LOG, "wb") as log:  # not a pipe, which a process that is left would hold open
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=cwd, start_new_session=True)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
    finally:
        while left := [one for one in psutil.process_iter(["environ"]) if mark in (one.info["environ"] or {}).values()]:
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            time.sleep(0.05)
        process.wait()
    return code, LOG.read_text(errors="replace")


def need(*command: str | Path) -> None:
    """Run a command that must succeed."""
    code, output = execute(command, BUILD_LIMIT_S)
    if code != 0:
        sys.exit(f"{output[-4000:]}\nplanted: {' '.join(map(str, command))} failed")


# -- planting a fault


def packages_of(environment: Path) -> Path:
    return next((environment / "lib").glob("python3*/site-packages"))


def make_environment() -> None:
    """Make build/planted/env. Programs such as mscomm name their interpreter, so they are copied and changed."""
    shutil.rmtree(ENV, ignore_errors=True)
    packages = packages_of(VENV)
    folders = [VENV, VENV / "bin", VENV / "lib", packages.parent, packages]
    for folder in folders:
        (ENV / folder.relative_to(VENV)).mkdir(parents=True)
    for entry in [one for folder in folders for one in folder.iterdir() if one not in folders]:
        target, start = ENV / entry.relative_to(VENV), f"#!{VENV}/bin/python".encode()
        if entry.is_file() and entry.open("rb").read(len(start)) == start:
            target.write_bytes(entry.read_bytes().replace(bytes(VENV), bytes(ENV), 1))
            target.chmod(0o755)
        elif entry not in (packages / "mscomm", VENV / "lib64"):
            target.symlink_to(entry)


def mirror(source: Path, target: Path) -> None:
    """Make two folders equal. Leave equal files alone, because ninja builds again what depends on a new file."""
    wanted = {path.relative_to(source): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    for path in [path for path in target.rglob("*") if path.is_file() and path.relative_to(target) not in wanted]:
        path.unlink()
    for name, content in wanted.items():
        path = target / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def build(folder: Path, options: Sequence[str], *targets: str) -> None:
    """Build targets from the sources in build/planted/source."""
    if not (folder / "build.ninja").exists():
        always = (f"-DCMAKE_MAKE_PROGRAM={BIN}/ninja", f"-DPython_EXECUTABLE={BIN}/python")
        need(BIN / "cmake", "-S", SOURCE, "-B", folder, "-G", "Ninja", *always, *options)
    need(BIN / "ninja", "-C", folder, *targets)


def build_module(package: Path) -> None:
    """Build the C++ module of the package, and put it into the package."""
    pybind11 = packages_of(VENV) / "pybind11/share/cmake/pybind11"
    build(BUILD / "module", [f"-Dpybind11_DIR={pybind11}", f"-DSKBUILD_PROJECT_VERSION={_core.version}"], "_core")
    (module,) = (BUILD / "module").glob("_core.*.so")
    shutil.copy(module, package)


def plant(fault: Fault | None, with_module: bool) -> None:
    """Make the package and the sources with this fault, or without any. with_module: whether to build the module."""
    package = packages_of(ENV) / "mscomm"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(packages_of(VENV) / "mscomm", package)
    for source, name in ((ROOT / "csrc", "csrc"), (ROOT / "src", "src"), (HERE.parent / "core", "tests/core")):
        mirror(source, SOURCE / name)
    shutil.copy2(ROOT / "CMakeLists.txt", SOURCE)
    if fault:
        name = fault.file.removeprefix("python/mscomm/")
        path = (SOURCE if name == fault.file else package) / name
        text = path.read_text()
        if text.count(fault.old) != 1:
            sys.exit(f"planted: {path} does not have the text of {fault.name} once; run `make .venv/.dev`")
        path.write_text(text.replace(fault.old, fault.new))
    if with_module:
        build_module(package)


def needs_module(fault: Fault) -> bool:
    return fault.tier != "core" and not fault.file.startswith("python/")


# -- running the tests


def of_tests(tier: str, rows: Sequence[str], limit_s: float) -> str:
    """Run these tests of a tier, or all if `rows` is empty.

    Return the first test that fails, or how else the tests failed; "" if all tests pass.
    """
    if tier == "core":
        options = [f"-DMSCOMM_{option}" for option in OF_TESTS]
        build(BUILD / "tests", [*options, "-DCMAKE_BUILD_TYPE=RelWithDebInfo"], "core_tests_all")
        suites = [row.removesuffix("_test") for row in rows]
        chosen = ["-R", f"^({'|'.join(suites)})$"] if rows else []
        command = [BIN / "ctest", "--test-dir", BUILD / "tests", "--no-tests=error", "--stop-on-failure", *chosen]
        failing, name = {8}, r"^\s*\d+ - (\w+) \(.*\)$"
    else:
        command = [BIN / "python", *PYTEST, *(rows or CHOOSING[tier])]
        failing, name = {1, 2}, r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$"
    code, output = execute(command, limit_s, HERE.parent)
    if code not in {None, 0} | failing:
        sys.exit(f"{output[-4000:]}\nplanted: the tests did not run: exit code {code}")
    failed = re.search(name, output, re.MULTILINE)
    return "" if code == 0 else failed[1] if failed else "a hang" if code is None else f"exit code {code}"


def check_without_fault(faults: Sequence[Fault]) -> None:
    """Check that the tests in the rows pass without a fault."""
    plant(None, any(map(needs_module, faults)))
    for tier in dict.fromkeys(fault.tier for fault in faults):
        rows = list(dict.fromkeys(row for fault in faults if fault.tier == tier for row in fault.tests))
        print(f"without a fault: {tier}: {', '.join(rows)}", flush=True)
        if failed := of_tests(tier, rows, TIER_LIMIT_S):
            sys.exit(f"{LOG.read_text(errors='replace')[-4000:]}\nplanted: without a fault, {failed} fails; see {LOG}")


def measure(fault: Fault, only_first: bool) -> dict[str, Any]:
    """Plant a fault and run its tests. Return the result."""
    began = time.monotonic()
    plant(fault, needs_module(fault))
    found, by = of_tests(fault.tier, fault.tests, ROW_LIMIT_S), "row"
    if not found and not only_first:
        found, by = of_tests(fault.tier, (), TIER_LIMIT_S), "tier"
        plant(None, needs_module(fault))
        if "::" in found and of_tests(fault.tier, [found], ROW_LIMIT_S):
            sys.exit(f"planted: {found} fails without a fault, too; see {LOG}")
    seconds = round(time.monotonic() - began)
    print(f"{fault.name}: {found or 'NOT FOUND'}, {seconds} s", flush=True)
    return {"name": fault.name, "found": found, "by": by, "seconds": seconds, "seed": rotated.seed()}


# -- the results


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the results in Markdown, and a line with how many faults of each area were found."""
    lines = [TITLE, "", "| fault | file | what it breaks | tier | found by | s |", "|---|---|---|---|---|---:|"]
    all_of, found_of = Counter[str](), Counter[str]()
    faults = {fault.name: fault for fault in FAULTS}
    for result in results:
        fault, found = faults[result["name"]], result["found"].replace("|", "\\|")
        by = f"{found} (not in its row)" if result["by"] == "tier" else found
        cells = (fault.name, fault.file, fault.breaks, fault.tier, by if found else "**nothing**", result["seconds"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
        folder = fault.file.removeprefix("python/mscomm/").partition("/")[0]
        area = folder if folder in AREAS else "other"
        all_of[area] += 1
        found_of[area] += bool(found)
    areas = ", ".join(f"{area} {found_of[area]} of {number}" for area, number in all_of.items())
    seeds = ", ".join(dict.fromkeys(result["seed"] for result in results))
    summary = f"Found: {found_of.total()} of {all_of.total()} ({areas}). {rotated.SEED}: {seeds}."
    return "\n".join([*lines, "", summary])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="the faults to plant; all by default")
    parser.add_argument("--only-first", action="store_true", help="run only the tests of the rows")
    parser.add_argument("--table", type=Path, help="write the table to this file instead of stdout")
    parser.add_argument("--from", type=Path, dest="earlier", help="go on with the results of an earlier run")
    options = parser.parse_args()
    if unknown := set(options.names) - {fault.name for fault in FAULTS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    kept = options.earlier or BUILD / "results.json"
    results = json.loads(options.earlier.read_text()) if options.earlier else []
    done = {result["name"] for result in results}
    left = [fault for fault in FAULTS if fault.name not in done and fault.name in (options.names or [fault.name])]
    if left:
        BUILD.mkdir(parents=True, exist_ok=True)
        fcntl.flock(os.open(BUILD, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails during another run
        make_environment()
        check_without_fault(left)
    for fault in left:
        results.append(measure(fault, options.only_first))
        kept.write_text(json.dumps(results, indent=1))
    text = table(results)
    print(text) if options.table is None else options.table.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
