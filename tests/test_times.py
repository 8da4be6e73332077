"""The times that the documentation states are the constants of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mscomm import environment
from mscomm.bootstrap import rendezvous
from mscomm.cluster import hello, hub, judge, links, member, returning, waiting
from mscomm.launching import processes
from mscomm.train import monitors

ROOT = Path(__file__).parent.parent
FIRST, SECOND, EVERY = member.NOTICES_S
JOINING, CALL, SILENCE = (
    environment.read(name, {}) for name in ("MS_TOPO_TIMEOUT", "MSCOMM_TIMEOUT", "MS_NODE_TIMEOUT")
)

SENTENCES = [
    ("guide.md", f"the other ranks have {processes.REPORT_S:g} s to report their errors"),
    ("guide.md", f"sends them SIGTERM, and {processes.GRACE_S:g} s later SIGKILL"),
    ("guide.md", f"a rank that fails within {processes.SHORT_S:g} s of its start again and again"),
    ("guide.md", f"at most {processes.LATEST_S:g} s"),
    ("errors.md", f"still there {processes.KILLED_S:g} s after SIGKILL"),
    ("guide.md", f"within these {processes.REPORT_S:g} s"),
    ("guide.md", f"kills the stopped ranks after {processes.STOPPED_S:g} s"),
    ("guide.md", f"after {FIRST:g} s, after {SECOND:g} s, and then every {EVERY / 60:g} minutes"),
    ("guide.md", f"node 0 names them after {waiting._TELL_AFTER_S:g} s and then every minute"),
    ("guide.md", f"otherwise `MS_TOPO_TIMEOUT`, otherwise {JOINING:g} s"),
    ("guide.md", f"otherwise `MSCOMM_TIMEOUT`, otherwise {CALL:g} s"),
    ("errors.md", f"waited for it for {processes.STOPPED_S:g} s after all other ranks had ended"),
    ("errors.md", f"gave no sign of life within {judge.ANSWERS_WITHIN_S:g} s"),
    ("errors.md", f"did not answer the hub within {judge.CALLS_WITHIN_S:g} s"),
    ("errors.md", f"has been trying for {rendezvous._SAYS_WAITING_AFTER_S:g} s to reach the process"),
    ("errors.md", f"one line every {links._COMPLAIN_EVERY_S:g} s says how many more of this kind"),
    ("recovery.md", f"lost {hub._SHORT_LIVES} times in a row, each time within {hub._SHORT_LIFE_S:g} s"),
    ("recovery.md", f"it waits up to {returning.RETURN_S:g} s before it believes"),
    ("training.md", f"prints one line every {monitors._EVERY_S:g} s"),
    ("design/0001-call.md", f"waits at most {member.SETTLE_S:g} s for the verdict"),
    ("design/0001-call.md", f"waits up to {judge.REASON_WITHIN_S:g} s for the launcher to say how"),
    ("design/0001-call.md", f"the link ends after `MS_NODE_TIMEOUT` ({SILENCE:g} s by default)"),
    ("design/0001-call.md", f"The acceptor waits at most {hello.HELLO_S:g} s for the hello"),
    ("design/0001-call.md", f"After {FIRST:g} s of waiting, after {SECOND:g} s, and then every {EVERY:g} s, one line"),
]


@pytest.mark.parametrize(("page", "sentence"), SENTENCES)
def test_a_documented_time_is_that_of_the_code(page: str, sentence: str) -> None:
    text = " ".join((ROOT / "docs" / page).read_text().replace("\n* ", "\n").split())
    assert sentence in text


def test_hosts_that_are_missing_are_named_every_minute() -> None:
    assert waiting._TELL_EVERY_S == 60


def test_waits_in_python_and_in_the_core_are_told_at_the_same_times() -> None:
    header = (ROOT / "csrc/net/wait.h").read_text()
    told = re.search(r"first_notice_s = (\d+), second_notice_s = (\d+), notice_every_s = (\d+);", header)
    assert told and tuple(map(float, told.groups())) == member.NOTICES_S
