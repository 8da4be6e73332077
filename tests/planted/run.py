"""Measures the tests: plants the faults of faults.py, one at a time, and runs the tests that should find each.

    python tests/planted/run.py [NAMES...] [--tests DIR] [--only-first] [--table FILE] [--from FILE]

The tests run in build/planted/env, a copy of the environment .venv (`make .venv/.dev`) in which only mscomm is another
one. So neither the sources nor .venv change, and the processes that the tests start use the fault, too. A fault in C++
is planted in build/planted/source, and only what depends on it is built again.

First the tests of the fault's row run. If they pass, all tests of its tier run, too. If a run takes longer than LIMIT_S,
it has found the fault: something hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from faults import FAULTS, Fault

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENV = ROOT / ".venv"
BUILD = ROOT / "build/planted"
ENV, SOURCE, TOOLS, LOG, RESULTS = (BUILD / name for name in ("env", "source", "tools", "log", "results.json"))
PYTHON = ENV / "bin/python"
# The arguments of pytest for all tests of a tier. The tier "core" is the C++ tests.
TIERS: dict[str, list[str]] = {"check": [], "test": [], "test-all": ["-m", "not huge"]}
PARALLEL = ["-n", "3", "--dist", "loadfile"]  # as in the Makefile
LIMIT_S = 900.0
CONTROL_LIMIT_S = 5400.0
MARK = "MSCOMM_TEST_PLANTED"  # all processes of a run of tests inherit this variable
CMAKE = {
    "module": ["-DCMAKE_BUILD_TYPE=Release"],
    "tests": [
        "-DMSCOMM_PYTHON=OFF",
        "-DMSCOMM_TESTS=ON",
        "-DMSCOMM_SANITIZE=address",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    ],
}


# -- commands


def execute(command: Sequence[str | Path], limit_s: float, cwd: Path = ROOT) -> tuple[int | None, str]:
    """Run a command. Return its exit code, or None if it hangs, and its output. Kill all processes that it leaves."""
    mark = secrets.token_hex(8)
    env = {**os.environ, MARK: mark, "PATH": f"{ENV / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    if (mpich := ROOT / ".venv-mpich").exists():
        env["MSCOMM_TEST_MPICH"] = str(mpich)
    code: int | None = None
    with open(LOG, "wb") as log:  # not a pipe, which a process that stays behind would hold open
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=cwd, start_new_session=True)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
    finally:
        while _kill(f"{MARK}={mark}".encode()):
            time.sleep(0.05)
        process.wait()
    return code, LOG.read_text(errors="replace")


def _kill(mark: bytes) -> bool:
    """Kill the processes that have this variable. Return whether there were any."""
    killed = False
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if entry.name.isdigit() and mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                killed = True
    return killed


def need(command: Sequence[str | Path]) -> None:
    """Run a command that must succeed."""
    code, output = execute(command, LIMIT_S)
    if code != 0:
        sys.exit(f"{output[-4000:]}\nplanted: {' '.join(map(str, command))} failed")


# -- the environment and the package


def site(environment: Path) -> Path:
    return next((environment / "lib").glob("python3*/site-packages"))


def make_environment() -> None:
    """Make an environment like .venv, with links to all of its files except those that belong to mscomm or Python."""
    if not (VENV / ".dev").exists():
        sys.exit("planted: there is no .venv for the tests; run `make .venv/.dev`")
    shutil.rmtree(ENV, ignore_errors=True)
    packages = site(VENV).relative_to(VENV)
    own = {VENV / "bin", VENV / "lib", VENV / "lib64", *list((VENV / packages).parents)[:-1], site(VENV) / "mscomm"}
    for folder in (VENV, VENV / "bin", VENV / "lib", site(VENV).parent, site(VENV)):
        target = ENV / folder.relative_to(VENV)
        target.mkdir(parents=True)
        for entry in folder.iterdir():
            if entry in own or (folder == site(VENV).parent and entry == site(VENV)):
                continue
            begin = b"" if entry.is_dir() else entry.read_bytes()[:200]
            if begin.startswith(f"#!{VENV}/bin/python".encode()):  # a program of a package, such as mscomm or pytest
                (target / entry.name).write_bytes(entry.read_bytes().replace(bytes(VENV), bytes(ENV), 1))
                (target / entry.name).chmod(0o755)
            else:
                (target / entry.name).symlink_to(entry)


def mirror(source: Path, target: Path) -> None:
    """Make two folders equal. Do not touch equal files, because ninja builds again what depends on a touched file."""
    wanted = {path.relative_to(source): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    for path in [path for path in target.rglob("*") if path.is_file()]:
        if path.relative_to(target) not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = target / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def build(kind: str, *targets: str) -> Path:
    """Build targets from the sources in build/planted/source. Return the folder of the results."""
    folder = BUILD / kind
    if not (folder / "build.ninja").exists():
        options = list(CMAKE[kind])
        if kind == "module":
            need([PYTHON, "-m", "pip", "install", "-q", "--target", TOOLS, "pybind11>=3.0"])
            version = subprocess.check_output(
                [PYTHON, "-c", "import mscomm._core as core; print(core.version)"], text=True
            )
            options += [f"-Dpybind11_DIR={TOOLS}/pybind11/share/cmake/pybind11", f"-DPython_EXECUTABLE={PYTHON}"]
            options += [f"-DSKBUILD_PROJECT_VERSION={version.strip()}"]
        program = f"-DCMAKE_MAKE_PROGRAM={ENV / 'bin/ninja'}"
        need([ENV / "bin/cmake", "-S", SOURCE, "-B", folder, "-G", "Ninja", program, *options])
    need([ENV / "bin/ninja", "-C", folder, *targets])
    return folder


def plant(fault: Fault | None, tests: Path, with_module: bool) -> None:
    """Make the package with this fault, or without any. with_module: whether to build the module of the package."""
    package = site(ENV) / "mscomm"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(site(VENV) / "mscomm", package)
    for folder in ("csrc", "src"):
        mirror(ROOT / folder, SOURCE / folder)
    mirror(tests / "core", SOURCE / "tests/core")
    if not (SOURCE / "CMakeLists.txt").exists():
        shutil.copy(ROOT / "CMakeLists.txt", SOURCE)
    if fault:
        is_python = fault.file.startswith("python/mscomm/")
        path = package / fault.file.removeprefix("python/mscomm/") if is_python else SOURCE / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            sys.exit(f"planted: {fault.name}: {path} does not have the text once; is .venv up to date?")
        path.write_text(text.replace(fault.old, fault.new))
    if with_module:
        (module,) = build("module", "_core").glob("_core.*.so")
        shutil.copy(module, package)


# -- the tests


def of_pytest(arguments: Sequence[str], tests: Path, limit_s: float = LIMIT_S) -> str:
    """Run pytest. Return the first test that fails, or what else went wrong; "" if all tests pass."""
    code, output = execute([PYTHON, "-m", "pytest", "-q", "-x", *arguments], limit_s, tests.parent)
    absent = code == 4 and "not found: " in output  # an older commit may not have the tests of a row
    if code in (0, 5) or absent:
        return ""
    return _first(code, output, r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$")


def of_ctest(*arguments: str) -> str:
    """Run C++ tests. Return the same as of_pytest()."""
    limit = f"--timeout={LIMIT_S:g}"
    command = [ENV / "bin/ctest", "--test-dir", BUILD / "tests", "--stop-on-failure", limit, *arguments]
    return _first(*execute(command, 3 * LIMIT_S), r"^\s*\d+ - (\w+) \(.*\)$")


def _first(code: int | None, output: str, pattern: str) -> str:
    if code == 0:
        return ""
    found = re.search(pattern, output, re.MULTILINE)
    return found[1] if found else "a hang" if code is None else f"exit code {code}"


def paths(rows: Sequence[str], tests: Path) -> list[str]:
    return [str(tests / row) for row in rows]


def steps(fault: Fault, tests: Path) -> list[Callable[[], str]]:
    """Return functions that run the tests of the row, and then the other tests of the tier."""
    if fault.tier == "core":
        named = f"^({'|'.join(fault.tests)})$"

        def others() -> str:
            build("tests")
            return of_ctest("-E", named)

        build("tests", *fault.tests)
        return [lambda: of_ctest("-R", named), others]
    tier = TIERS[fault.tier]
    return [
        lambda: of_pytest([*tier, *paths(fault.tests, tests)], tests),
        lambda: of_pytest([*tier, *PARALLEL, str(tests)], tests),
    ]


def control(faults: Sequence[Fault], tests: Path) -> None:
    """Check that all tests of the rows pass without a fault."""
    plant(None, tests, any(map(needs_module, faults)))
    for tier in {fault.tier: None for fault in faults}:
        rows = list(dict.fromkeys(row for fault in faults if fault.tier == tier for row in fault.tests))
        print(f"control: {tier}: {', '.join(rows)}", flush=True)
        if tier == "core":
            build("tests", *rows)
            failed = of_ctest("-R", f"^({'|'.join(rows)})$")
        else:
            failed = of_pytest([*TIERS[tier], *PARALLEL, *paths(rows, tests)], tests, CONTROL_LIMIT_S)
        if failed:
            sys.exit(f"{LOG.read_text(errors='replace')[-4000:]}\nplanted: without a fault, {failed} fails; see {LOG}")


def needs_module(fault: Fault) -> bool:
    return fault.tier != "core" and not fault.file.startswith("python/")


# -- the results


def area(fault: Fault) -> str:
    top, _, rest = fault.file.removeprefix("python/mscomm/").partition("/")
    return top if rest and top in ("csrc", "src", "cluster", "train", "parallel") else "other"


def table(results: Sequence[dict[str, str]]) -> str:
    """Return a table of the results in Markdown, and a line with how many faults of each area were found."""
    lines = ["| fault | file | what it breaks | tier | found by | s |", "|---|---|---|---|---|---:|"]
    counts: dict[str, list[int]] = {}
    rows = {result["name"]: result for result in results}
    for fault in FAULTS:
        if result := rows.get(fault.name):
            by = result["found"].replace("|", "\\|") or "**not found**"
            by += " (not in its row)" * (result["step"] == "tier")
            lines.append(
                f"| {fault.name} | {fault.file} | {fault.breaks} | {fault.tier} | {by} | {result['seconds']} |"
            )
            counts.setdefault(area(fault), []).append(bool(result["found"]))
    every = [found for some in counts.values() for found in some]
    totals = ", ".join(f"{name} {sum(some)} of {len(some)}" for name, some in counts.items())
    return "\n".join([*lines, "", f"Found: {sum(every)} of {len(every)} ({totals})."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="the faults to plant; all by default")
    parser.add_argument("--tests", type=Path, default=HERE.parent, help="a folder tests/, perhaps of another commit")
    parser.add_argument("--only-first", action="store_true", help="run only the tests of a fault's row")
    parser.add_argument("--table", type=Path, help="the file for the table; stdout by default")
    parser.add_argument("--from", type=Path, dest="earlier", help="results of an earlier run, which this run continues")
    options = parser.parse_args()
    if unknown := set(options.names) - {fault.name for fault in FAULTS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    kept, tests = options.earlier or RESULTS, options.tests.resolve()
    results: list[dict[str, str]] = json.loads(kept.read_text()) if options.earlier and kept.exists() else []
    done = {result["name"] for result in results}
    left = [one for one in FAULTS if one.name not in done and (not options.names or one.name in options.names)]
    BUILD.mkdir(parents=True, exist_ok=True)
    if left:
        make_environment()
        control(left, tests)
    for fault in left:
        plant(fault, tests, needs_module(fault))
        first, *others = steps(fault, tests)
        began, step = time.monotonic(), "row"
        found = first()
        if not found and not options.only_first:
            found, step = others[0](), "tier"
        seconds = f"{time.monotonic() - began:.0f}"
        results.append({"name": fault.name, "found": found, "step": step if found else "", "seconds": seconds})
        kept.write_text(json.dumps(results, indent=1))
        print(f"{fault.name}: {found or 'NOT FOUND'}, {seconds} s", flush=True)
    text = table(results)
    print(text) if options.table is None else options.table.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
