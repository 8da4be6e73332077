"""The table of environment variables, its page docs/env.md, and the lines of MSCOMM_DEBUG."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mscomm import environment

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python/mscomm"
OURS = re.compile(r"(?:MSCOMM|MS)_[A-Z_]*[A-Z]")
VALUES = {"MS_SCHED", "MS_WORKER", "MS_PSERVER"}  # these are values of MS_ROLE, not variables


def module_of(path: Path) -> str:
    """Return the name of a file's module: cli.run for cli/run.py, bootstrap for bootstrap/__init__.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@pytest.fixture(scope="module")
def in_code() -> dict[str, set[str]]:
    """Return the modules and C++ files that use each variable. In Python, a string counts as a variable if it is in the
    table, or if it begins with MSCOMM_ or MS_ and is not in VALUES. In C++, an argument of getenv counts.
    """
    known = {row.name for row in environment.VARIABLES}
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "environment.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if text in known or (OURS.fullmatch(text) and text not in VALUES):
                    found.setdefault(text, set()).add(module_of(path))
    for path in (path for folder in ("csrc", "src") for path in (ROOT / folder).rglob("*.cc")):
        for name in re.findall(r'getenv\("(\w+)"\)', path.read_text()):
            found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


each_row = pytest.mark.parametrize("row", environment.VARIABLES, ids=lambda row: row.name)


def test_names_are_unique() -> None:
    names = [row.name for row in environment.VARIABLES]
    assert len(names) == len(set(names))


def test_every_variable_that_the_code_names_has_a_row(in_code: dict[str, set[str]]) -> None:
    assert set(in_code) - {row.name for row in environment.VARIABLES} == set()


@each_row
def test_the_readers_of_a_row_are_those_of_the_code(row: environment.Variable, in_code: dict[str, set[str]]) -> None:
    """If the code no longer reads a variable, the variable's row must be deleted, too."""
    assert row.readers
    assert set(row.readers) <= in_code.get(row.name, set())


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / "docs/env.md").read_text() == environment.page(), "run: python -m mscomm.environment"


def test_the_page_is_written_by_the_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mscomm.environment", str(tmp_path / "env.md")]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "env.md").read_text() == environment.page()
    missing = [sys.executable, "-m", "mscomm.environment", str(tmp_path / "nowhere/env.md")]
    done = subprocess.run(missing, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "No such file" in done.stderr


# -- values


@each_row
def test_unset_and_empty_give_the_default(row: environment.Variable) -> None:
    assert row.read({}) == row.default
    assert row.read({row.name: " "}) == row.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("MSCOMM_TIMEOUT", "2.5", 2.5),
        ("MSCOMM_TIMEOUT", "inf", float("inf")),
        ("MS_TOPO_TIMEOUT", " 60 ", 60.0),
        ("MS_NODE_TIMEOUT", "5", 5.0),
        ("MS_SCHED_PORT", "8117", 8117),
        ("MS_WORKER_NUM", "1", 1),
        ("MS_ROLE", "MS_SCHED", "MS_SCHED"),
        ("MSCOMM_DEBUG", "info", "INFO"),
        ("OMP_NUM_THREADS", "4,2", 4),
        ("MSCOMM_ALGO", "ring", "ring"),
        ("MSCOMM_PORTS", "20000-20100", range(20000, 20101)),
    ],
)
def test_a_text_becomes_a_value(name: str, text: str, value: object) -> None:
    assert environment.read(name, {name: text}) == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("MSCOMM_TIMEOUT", "soon", "a number of seconds"),
        ("MSCOMM_TIMEOUT", "0", "more than 0"),
        ("MSCOMM_TIMEOUT", "nan", "more than 0"),
        ("MS_NODE_TIMEOUT", "inf", "less than a day"),
        ("MS_SCHED_PORT", "65536", "1 to 65535"),
        ("MS_SCHED_PORT", "٣", "1 to 65535"),
        ("MS_SERVER_NUM", "1", "no parameter servers"),
        ("MS_ROLE", "MS_PSERVER", "MS_SCHED, MS_WORKER"),
        ("MSCOMM_DEBUG", "ALL", "VERSION, WARN, INFO, TRACE"),
        ("OMP_NUM_THREADS", "many", "a number of threads"),
        ("MSCOMM_PORTS", "20100-20000", "the lower one first"),
        ("MSCOMM_PORTS", "20000", "e.g. 20000-20100"),
    ],
)
def test_an_error_names_variable_text_and_what_was_expected(name: str, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}={text!r}: expected .*{re.escape(expected)}"):
        environment.read(name, {name: text})


def test_given_has_what_is_set_of_a_kind() -> None:
    env = {"MSCOMM_ALGO": "ring", "MSCOMM_RANK": "3", "MS_ROLE": "", "HOME": "/root"}
    assert environment.given(env) == {"MSCOMM_ALGO": "ring", "MSCOMM_RANK": "3"}
    assert environment.given(env, environment.RUN) == {"MSCOMM_RANK": "3"}


def test_the_table_and_the_log_are_light() -> None:
    """init() imports environment.py and log.py, so a package that one of them imports would slow down init()."""
    look = "import sys, mscomm.environment, mscomm.log; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)
    assert not {"numpy", "click", "rich", "psutil", "msgpack", "mscomm._core"} & set(done.stdout.split())


# -- MSCOMM_DEBUG

SPEAK = """
from mscomm import log
log.version("mscomm 9")
log.info("before the rank is known")
log.set_rank(3)
log.warn("two\\nlines")
log.info("found")
log.trace("call")
"""


def speak(**env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MSCOMM_")}
    return subprocess.run(
        [sys.executable, "-c", SPEAK], capture_output=True, text=True, timeout=60, env={**clean, **env}
    )


@pytest.mark.parametrize(
    ("level", "told"),
    [
        ("", ["WARN two", "WARN lines"]),
        ("VERSION", ["VERSION mscomm 9"]),
        ("WARN", ["VERSION mscomm 9", "WARN two", "WARN lines"]),
        ("INFO", ["VERSION mscomm 9", "INFO before the rank is known", "WARN two", "WARN lines", "INFO found"]),
        (
            "TRACE",
            [
                "VERSION mscomm 9",
                "INFO before the rank is known",
                "WARN two",
                "WARN lines",
                "INFO found",
                "TRACE call",
            ],
        ),
    ],
)
def test_a_level_has_the_lines_of_those_before_it(level: str, told: list[str]) -> None:
    done = speak(MSCOMM_DEBUG=level)
    assert done.returncode == 0, done.stderr
    assert [re.sub(r"^mscomm \S+:\d+ \[(-|3)\] ", "", line) for line in done.stderr.splitlines()] == told


def test_a_line_says_host_process_and_rank() -> None:
    first, second, *_ = speak(MSCOMM_DEBUG="INFO").stderr.splitlines()[1:]
    assert re.fullmatch(r"mscomm [\w-]+:\d+ \[-\] INFO before the rank is known", first)
    assert re.fullmatch(r"mscomm [\w-]+:\d+ \[3\] WARN two", second)


def test_the_lines_go_to_the_file_that_the_rank_names(tmp_path: Path) -> None:
    done = speak(MSCOMM_DEBUG="INFO", MSCOMM_DEBUG_FILE=f"{tmp_path}/%h-%p-%r-%%-%z.log")
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"[\w-]+-\d+-3-%-%z\.log", path.name)
    assert len(path.read_text().splitlines()) == 5  # including the lines from before the rank was known


def test_a_file_that_cannot_be_opened_is_told_and_costs_no_line(tmp_path: Path) -> None:
    done = speak(MSCOMM_DEBUG_FILE=f"{tmp_path}/nowhere/log")
    assert done.returncode == 0
    assert "nowhere/log: No such file or directory; the lines go to stderr" in done.stderr
    assert "WARN two" in done.stderr


def test_a_level_that_is_none_is_an_error() -> None:
    assert "MSCOMM_DEBUG='LOUD': expected one of VERSION, WARN, INFO, TRACE" in speak(MSCOMM_DEBUG="LOUD").stderr
