"""The tiers of checks, and the table of test files."""

from __future__ import annotations

from pathlib import Path

import promises
import pytest
import rotated
import tiers

HERE = Path(__file__).parent
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one[2]" time="1.5"/>
<testcase classname="tests.test_a" name="test_two" time="0.25"/>
<testcase classname="tests.test_a" name="test_three" time="0.01"><skipped message="no torch"/></testcase>
</testsuite></testsuites>"""


def test_every_test_file_has_a_row_in_the_table():
    listed = [name for files in promises.PROMISES.values() for name in files]
    assert sorted(listed) == sorted(str(path.relative_to(HERE)) for path in HERE.rglob("test_*.py"))


def test_every_quick_file_is_named_with_its_path(capsys):
    promises.main("quick")
    paths = capsys.readouterr().out.split()
    assert len(paths) > 20 and all(Path(path).is_file() for path in paths)


@pytest.mark.parametrize(("budget_s", "code"), [(1000, 0), (0, 1)])
def test_a_tier_fails_if_it_needs_more_cpu_time_than_its_budget(budget_s, code, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tiers, "TIMES", tmp_path)
    monkeypatch.setitem(tiers.TIERS, "small", ("help",))
    monkeypatch.setitem(tiers.BUDGETS_S, "small", budget_s)
    assert tiers.main("small") == code
    assert ("all passed" in capfd.readouterr().out) == (code == 0)


def test_a_tier_ends_at_its_first_step_that_fails(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tiers, "TIMES", tmp_path)
    monkeypatch.setitem(tiers.TIERS, "small", ("no-such-target", "help"))
    monkeypatch.setitem(tiers.BUDGETS_S, "small", 1000)
    assert tiers.main("small") == 1
    out = capfd.readouterr().out
    assert out.endswith("make small: make no-such-target failed\n") and "--- make help" not in out


def test_the_slowest_tests_come_first_and_skipped_ones_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "TIMES", tmp_path)
    (tmp_path / "python.xml").write_text(REPORT)
    ran, skipped = tiers.results()
    assert ran == [(1.5, "python: test_a.test_one[2]"), (0.25, "python: test_a.test_two")]
    assert skipped == {"no torch": 1}


def test_each_run_tests_some_cases_and_make_test_all_tests_every_one(monkeypatch):
    product = [(number, letter) for number in range(3) for letter in "xy"]
    chosen = set()
    for seed in range(100):
        monkeypatch.setenv(rotated.SEED, str(seed))
        cases, again = (rotated.rotated(product, few=2, always=[(0, "x")]) for _ in range(2))
        assert [case.values for case in cases] == product
        now = {case.values for case in cases if not case.marks}
        assert len(now) == 3 and (0, "x") in now
        assert now == {case.values for case in again if not case.marks}
        chosen |= now
    assert chosen == set(product)
