"""The output of a typical failure fits one screen and ends with its cause and a remedy. docs/errors.md and README.md
show the real output.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

SCREENS = Path(__file__).parent.parent / "docs/screens.py"
spec = importlib.util.spec_from_file_location("screens", SCREENS)
assert spec and spec.loader
screens = importlib.util.module_from_spec(spec)
spec.loader.exec_module(screens)

QUICK = ("mismatch", "script", "port", "ctrl-c")  # only `make test-all` tests the other screens


def documented(page: Path, name: str) -> str | None:
    found = re.search(rf"<!-- screen {name} -->\n.*?```console\n(.*?)```\n<!-- end -->", page.read_text(), flags=re.S)
    return found[1] if found else None


def without_marks(screen: str) -> list[str]:
    """Return the screen's lines, except those that only underline code: each Python version underlines differently."""
    return [line for line in screen.splitlines() if line.removeprefix("[0-3]").strip(" ^~")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in screens.FAILURES]
)
def test_a_usual_failure_is_one_screen_with_cause_and_remedy(name: str) -> None:
    failure = screens.FAILURES[name]
    screen = screens.shown(failure)
    assert screens.lines_of(screen) <= screens.SCREEN_LINES, screen
    last = screen.splitlines()[-1]
    assert failure.cause in last and failure.remedy in last, screen
    readme, errors = screens.PAGES
    for page in (readme, errors):
        text = documented(page, name)
        assert text or page == readme
        if text:
            assert without_marks(text) == without_marks(screen), "run python docs/screens.py"


def test_there_are_ten_of_them() -> None:
    assert len(screens.FAILURES) == 10
