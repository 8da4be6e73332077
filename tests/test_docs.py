"""The docs are correct: links lead somewhere, variables and messages exist in the code, and the examples run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from sessions import clean_environment, run

from mscomm.cluster.hub import FROM_RANKS
from mscomm.cluster.launchers import FROM_LAUNCHERS

ROOT = Path(__file__).parent.parent
README, GUIDE, ERRORS = ROOT / "README.md", ROOT / "docs/guide.md", ROOT / "docs/errors.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
SOURCES = [(ROOT / "python/mscomm", "*.py"), (ROOT / "csrc", "*.cc"), (ROOT / "src", "*.*")]
CODE = "\n".join(path.read_text() for folder, pattern in SOURCES for path in sorted(folder.rglob(pattern)))
VARIABLE = r"\b(?:MSCOMM|MS|OMPI|PMIX|PMI|MPI|SLURM|JSM|OMP)_[A-Z_]+\b"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@each_page
def test_files_of_the_repository_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:csrc|src|python|tests|bench|docs|examples)/[\w./-]+)`", prose(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


def documented_variables() -> set[str]:
    """Return the variable names in the first two columns of the tables of docs/env.md and of a section of the guide."""
    section = re.split(r"^## ", GUIDE.read_text().partition("## Environment variables")[2], maxsplit=1, flags=re.M)[0]
    section += (ROOT / "docs/env.md").read_text()
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    return {name for row in rows for cell in row[1:3] for name in re.findall(VARIABLE, cell)}


def test_every_documented_variable_occurs_in_the_code() -> None:
    assert {name for name in documented_variables() if name not in CODE} == set()


def test_every_variable_of_ours_in_the_code_is_documented() -> None:
    macros = {"MSCOMM_VERSION", "MSCOMM_LEVELS", "MSCOMM_BASELINE_ONLY"}
    not_variables = macros | {"MS_SCHED", "MS_WORKER", "MS_PSERVER"}  # values of MS_ROLE
    ours = set(re.findall(r"\b(?:MSCOMM|MS)_[A-Z_]*[A-Z]\b", CODE)) - not_variables
    assert ours - documented_variables() == set()


def test_every_message_of_the_errors_page_is_in_the_code() -> None:
    """Headings quote messages in backticks. In a quoted message, … stands for the parts that vary."""
    joined = re.sub(r"""["']\s*\n\s*f?["']""", "", CODE).replace("`", "")  # join literals that are split over lines
    headings = "\n".join(re.findall(r"^### (.*)$", ERRORS.read_text(), flags=re.M))
    quoted = re.findall(r"`(.*?)`", headings)
    fragments = {part.strip(" ;:,)(") for text in quoted for part in text.split("…")}
    assert len(quoted) > 80
    assert {part for part in fragments if part not in joined} == set()


def test_the_guides_interactive_examples_print_what_it_shows(tmp_path: Path) -> None:
    session = tmp_path / "session.txt"
    session.write_text("\n".join(blocks(GUIDE, "pycon")))
    command = [sys.executable, "-m", "doctest", "-o", "NORMALIZE_WHITESPACE", session]
    done = run(command, env=clean_environment())
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_program_prints_what_the_pages_show(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text(blocks(README, "python")[0])
    command = [sys.executable, "-m", "mscomm", "run", "-n", "4", script]
    done = run(command, env=clean_environment())
    assert done.returncode == 0, done.stderr
    for page in (README, GUIDE):
        assert blocks(page, "python")[0] == script.read_text()
        shown = next(block for block in blocks(page, "console") if "run -n 4 hello.py" in block)
        assert sorted(done.stdout.splitlines()) == sorted(line for line in shown.splitlines() if line.startswith("["))


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("groups.py", "[0] 2 x 2 ranks, the largest difference is none\n"),
        ("uneven_gather.py", "[0] 1229 primes below 10000, by rank [367, 302, 281, 279]; the largest is 9973\n"),
    ],
)
def test_an_example_prints_its_result(example: str, printed: str) -> None:
    command = [sys.executable, "-m", "mscomm", "run", "-n", "4", ROOT / "examples" / example]
    done = run(command, env=clean_environment())
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_the_tables_of_control_frames_name_what_the_hub_handles():
    page = (ROOT / "docs/design/0001-call.md").read_text()
    frames = page.partition("\n## Frames\n")[2].partition("\n## ")[0]
    from_ranks, from_launchers = re.findall(r"^\| to the hub .*\n(?:\|.*\n)+", frames, re.M)
    for table, handled in ((from_ranks, FROM_RANKS), (from_launchers, FROM_LAUNCHERS)):
        assert set(re.findall(r"^\| `([^`]+)`", table, re.M)) == set(handled)
