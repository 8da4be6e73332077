"""The groups of an epoch: which frames tell their ranks about a failure, and in which order."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
from control import WORLD

from mscomm import errors
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.groups import Groups
from mscomm.cluster.plan import group_id, world_id
from mscomm.cluster.roster import Link, Roster

SIZE = 3
PAIR = group_id(0, "pair", [0, 1], 1)


@pytest.fixture
def roster():
    roster = Roster(SIZE, ranks_known=True)
    with contextlib.ExitStack() as ends:
        for rank in range(SIZE):
            ours, theirs = socket.socketpair()
            ends.enter_context(theirs)
            link = Link(ByteStream(ends.enter_context(ours)), rank, adopted=True)
            assert roster.admit(link, rank, None, {"size": SIZE}) is None
        yield roster


def groups_of(roster):
    return Groups(roster, 0, watched=False, restarts=True, log=lambda text: None)


def told(groups, after_s=0.0):
    """Return the verdicts that are sent now, or in so many seconds: the ids of the groups, and the texts."""
    frames = [notice.frame for notice in groups.look(time.monotonic() + after_s)]
    return [(frame["group"], frame["text"]) for frame in frames if frame["t"] == "verdict"]


def test_a_group_gets_its_own_verdict_before_an_abort(roster):
    groups = groups_of(roster)
    groups.found(PAIR, [0, 1])
    groups.failed(0, PAIR, errors.Aborted("of the pair", [0]), -1, "")
    assert groups.abort(errors.Aborted("of all", [2]))
    groups.failed(2, "", errors.Aborted("of all", [2]), -1, "")
    assert told(groups) == [(WORLD, "of all"), (PAIR, "of the pair"), ("", "of all")]
    assert told(groups) == []
    assert list(groups.verdicts_for(2)) == [
        {"t": "verdict", "group": group, **errors.Aborted("of all", [2]).fields()} for group in (WORLD, "")
    ]


def test_only_the_first_abort_of_an_epoch_counts(roster):
    groups = groups_of(roster)
    assert groups.abort(errors.Aborted("first", [0]))
    assert not groups.abort(errors.Aborted("second", [1]))
    assert told(groups) == [("", "first")]
    groups.begin(1)
    assert told(groups) == [] and list(groups.verdicts_for(0)) == []
    assert groups.abort(errors.Aborted("in the next epoch", [0]))
    assert told(groups) == [("", "in the next epoch")]


def test_a_rank_that_left_because_of_another_group_is_explained(roster):
    groups = groups_of(roster)
    groups.found(PAIR, [0, 1])
    groups.failed(1, PAIR, errors.Aborted("out of data", [1]), -1, "")
    assert told(groups) == [(PAIR, "out of data")]
    roster.at(1).left = True
    groups.left(1, 4, {})
    groups.failed(0, WORLD, errors.PeerLost("rank 1 has left the job", [1]), 5, "")
    ((group, text),) = told(groups, after_s=10)
    assert group == WORLD
    assert text == "rank 1 has left the job; before that another group of that rank failed: out of data"


@pytest.mark.parametrize("waits", ["waits", "destroyed the group"])
def test_a_rank_that_left_for_the_next_epoch_is_explained(roster, waits):
    groups = groups_of(roster)
    groups.found(PAIR, [0, 1])
    groups.lost(2, "ended without release")
    assert told(groups, after_s=10) == [(WORLD, "rank 2 ended without release")]
    if waits == "waits":
        roster.at(1).waits = roster.at(1).welcomed = True
    else:
        assert groups.destroyed(1, PAIR, 3)
    groups.failed(0, PAIR, errors.PeerLost("rank 1 is lost", [1]), 4, "")
    ((group, text),) = told(groups, after_s=10)
    assert group == PAIR
    assert text == "rank 2 ended without release; rank 1 therefore left this group for the next epoch"


def test_a_group_that_all_have_destroyed_is_forgotten(roster):
    groups = groups_of(roster)
    groups.found(PAIR, [0, 1])
    assert groups.destroyed(0, PAIR, 1)
    assert not groups.destroyed(2, PAIR, 1)  # rank 2 is not in the group
    assert not groups.destroyed(1, PAIR, 1)  # nobody is left who must be told
    assert groups.get(PAIR) is None
    assert not groups.destroyed(0, world_id(0), 1)  # the world ends with the job
    assert [group.id for group in groups] == [WORLD]
