"""Meetings: ranks wait for each other and exchange facts. Some tests do no I/O, the others use a real hub."""

from __future__ import annotations

import threading

import pytest
from control import Communicator, Job, NoLinks, eventually

from mscomm import errors
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.judge import Judge
from mscomm.cluster.meetings import MOST_REFUSED, Answer, Meetings


class Table:
    """Meetings without I/O. The ranks in `gone` count as lost."""

    def __init__(self):
        self.gone: dict[int, str] = {}
        self.judge = Judge(lambda rank: f"rank {rank}", lambda: range(3), watched=True)
        self.meetings = Meetings(self.gone.get, lambda rank: f"rank {rank}", lambda: self.judge)

    def come(self, rank, ranks, key="k", name="init", survivors=False, alone=True, **facts):
        return list(self.meetings.come(rank, key, name, ranks, facts, survivors, alone))


def unmet(answers):
    return [
        (ranks, message["kind"], message["text"], list(message["waiting_for"] or message["ranks"]))
        for ranks, message in answers
    ]


def test_nobody_hears_anything_before_the_last_has_come():
    table = Table()
    assert table.come(2, [0, 2], colour="red") == []
    met = {"t": "met", "key": "k", "ranks": [0, 2], "facts": [{"colour": "blue"}, {"colour": "red"}]}
    assert table.come(0, [0, 2], colour="blue") == [Answer((2, 0), met)]


def test_facts_are_in_the_order_of_the_list_and_not_of_coming():
    table = Table()
    table.come(1, [2, 1, 0], who=1)
    table.come(0, [2, 1, 0], who=0)
    (answer,) = table.come(2, [2, 1, 0], who=2)
    assert [fact["who"] for fact in answer.frame["facts"]] == [2, 1, 0]


def test_a_key_can_be_met_at_again():
    table = Table()
    for _ in range(2):
        table.come(0, [0, 1])
        assert table.come(1, [0, 1])[0].frame["t"] == "met"


def test_ranks_that_name_each_other_in_different_lists_differ():
    table = Table()
    table.come(0, [0, 1], key="a", name="create_group('g')")
    answers = table.come(1, [0, 1, 2], key="b", name="create_group('g')")
    why = "create_group('g'): the ranks do not agree on who takes part: rank 0 named [0, 1]; rank 1 named [0, 1, 2]"
    assert unmet(answers) == [((0,), "Mismatch", why, [0, 1]), ((1,), "Mismatch", why, [0, 1])]


def test_different_lists_under_one_key_differ():
    table = Table()
    table.come(0, [0, 1])
    (told,) = unmet(table.come(1, [1, 2]))
    assert told == (
        (0, 1),
        "Mismatch",
        "init: the ranks do not agree on who takes part: rank 1 named [1, 2], not [0, 1]",
        [1],
    )


def test_two_groups_of_one_name_without_a_common_rank_are_two_groups():
    table = Table()
    assert table.come(0, [0, 1], key="a", name="pair") == []
    assert table.come(2, [2, 3], key="b", name="pair") == []
    assert table.come(1, [0, 1], key="a", name="pair")[0].ranks == (0, 1)
    assert table.come(3, [2, 3], key="b", name="pair")[0].ranks == (2, 3)


def test_who_is_lost_before_it_comes_ends_the_meeting():
    table = Table()
    table.come(0, [0, 1])
    table.gone[1] = "rank 1 ended without release"
    lost = [((0,), "PeerLost", "init: rank 1 ended without release", [1])]
    assert unmet(table.meetings.look()) == lost
    assert unmet(table.come(0, [0, 1])) == lost  # another meeting with the lost rank fails immediately


def test_who_comes_and_is_lost_ends_the_meeting_too():
    table = Table()
    table.come(1, [0, 1, 2])
    table.come(0, [0, 1, 2])
    table.gone[1] = "rank 1 ended without release"
    assert unmet(table.meetings.look()) == [((1, 0), "PeerLost", "init: rank 1 ended without release", [1])]


def test_a_meeting_without_a_lost_rank_tells_the_first_failure_of_the_job():
    table = Table()
    table.judge.verdict = errors.PeerLost("rank 1 ended without release: killed by SIGKILL", [1])
    table.gone[1], table.gone[2] = "rank 1 ended without release", "rank 2 has left the job"
    assert unmet(table.come(0, [0, 1])) == [((0,), "PeerLost", f"init: {table.judge.verdict}", [1])]
    why = f"init: rank 2 has left the job; before that, the job failed: {table.judge.verdict}"
    assert unmet(table.come(0, [0, 2])) == [((0,), "PeerLost", why, [2])]


def test_a_meeting_waits_for_the_judge_and_is_never_met_with_a_rank_that_is_lost():
    table = Table()
    table.come(1, [0, 1])
    table.gone[1] = "rank 1 ended without release"
    table.judge.gone(1, "ended without release", now=0)
    assert table.meetings.look() == []
    assert table.come(0, [0, 1]) == []  # the judge still waits for the launcher to report how rank 1 ended
    table.judge.process_ended(1, "exit code 7", badly=True, now=0.1)
    why = "init: rank 1 ended without release: exit code 7"
    assert unmet(table.meetings.look()) == [((1, 0), "PeerLost", why, [1])]


def test_a_refused_meeting_of_survivors_is_over():
    table = Table()
    table.come(1, [0, 1, 2], survivors=True)
    assert table.meetings.survivors_go_on
    table.gone[2] = "lost"
    assert table.meetings.missing("k") == [0]
    table.meetings.refuse(0, "k", "init", [0, 1, 2], "rank 0: enough")
    assert not table.meetings.survivors_go_on


def test_survivors_do_not_wait_for_the_lost():
    table = Table()
    table.come(1, [0, 1, 2, 3], survivors=True)
    table.come(0, [0, 1, 2, 3], survivors=True)
    table.gone[3] = "lost"
    assert table.meetings.look() == []
    table.gone[1] = "lost after it came"
    (answer,) = table.come(2, [0, 1, 2, 3], survivors=True)
    assert answer.ranks == (0, 2)
    assert answer.frame["ranks"] == [0, 2]


def test_a_meeting_costs_the_same_for_each_rank():
    """The hub serves thousands of ranks, so an arrival must not look at all ranks of the meeting."""
    table, asked, size = Table(), 0, 500

    def gone(rank):
        nonlocal asked
        asked += 1

    table.meetings = Meetings(gone, str, lambda: table.judge)
    answers = [table.come(rank, list(range(size))) for rank in range(size)]
    assert answers[:-1] == [[]] * (size - 1) and answers[-1][0].frame["t"] == "met"
    assert asked <= 3 * size


@pytest.mark.parametrize("last", ["comes", "is lost"])
def test_survivors_go_on_until_one_of_them_is_lost(last):
    table = Table()
    table.come(1, [0, 1, 2], survivors=True)
    if last == "comes":
        table.gone[0] = "lost"
        assert table.meetings.look() == []
        (answer,) = table.come(2, [0, 1, 2], survivors=True)
    else:
        table.come(2, [0, 1, 2], survivors=True)
        table.gone[0] = "lost"
        (answer,) = table.meetings.look()
    assert answer.frame["ranks"] == [1, 2]
    table.meetings.lost(0)
    assert table.meetings.survivors_go_on
    table.meetings.lost(2)
    assert not table.meetings.survivors_go_on


def test_survivors_that_have_all_left_do_not_go_on():
    table = Table()
    for rank in (1, 2):
        table.come(rank, [1, 2], survivors=True)
    table.gone[1] = "rank 1 has left the job"
    assert table.meetings.survivors_go_on
    table.gone[2] = "rank 2 has left the job"
    assert not table.meetings.survivors_go_on


def test_a_meeting_whose_survivors_are_all_lost_is_over():
    table = Table()
    table.come(0, [0, 1], survivors=True)
    for rank in (0, 1):
        table.gone[rank] = "lost"
        table.meetings.lost(rank)
    table.meetings.look()
    assert not table.meetings.survivors_go_on


def test_a_time_out_ends_the_meeting_for_all_that_have_come():
    table = Table()
    table.come(0, [0, 1, 2, 3])
    table.come(2, [0, 1, 2, 3])
    why = "init: rank 2 waited 3 s for rank 1, rank 3"
    assert unmet(table.meetings.withdraw(2, "k", 3.0)) == [((0, 2), "CollectiveTimeout", why, [1, 3])]
    assert table.meetings.withdraw(0, "k", 3.0) == []  # the meeting is already over


def test_who_refuses_ends_the_meeting_also_for_those_that_come_later():
    table = Table()
    table.come(1, [0, 1, 2])
    refused = [(rank, "Aborted", "rank 0: enough", [0]) for rank in ((1,), (2,))]
    assert unmet(table.meetings.refuse(0, "k", "init", [0, 1, 2], "rank 0: enough")) == refused[:1]
    assert unmet(table.come(2, [0, 1, 2])) == refused[1:]
    for rank in (0, 1):  # a new meeting of the same ranks begins
        assert table.come(rank, [0, 1, 2]) == []
    assert table.come(2, [0, 1, 2])[0].frame["t"] == "met"


def test_who_knows_of_a_refusal_may_try_again_before_the_last_has_heard_of_it():
    table = Table()
    table.meetings.refuse(0, "k", "init", [0, 1], "rank 0: enough")
    assert table.come(0, [0, 1]) == []
    assert table.come(1, [0, 1])[0].frame["t"] == "met"


@pytest.mark.parametrize("ended", ["refused", "withdrawn"])
def test_a_meeting_is_forgotten_when_nobody_can_come_any_more(ended):
    table = Table()
    table.come(0, [0, 1])
    table.gone[1] = "rank 1 has left the job"
    if ended == "refused":
        table.meetings.refuse(0, "k", "init", [0, 1], "rank 0: enough")
    else:
        table.meetings.withdraw(0, "k", 3.0)
    assert not table.meetings._open


def test_refused_meetings_to_which_nobody_comes_need_little_memory():
    table = Table()
    for number in range(MOST_REFUSED + 10):
        table.meetings.refuse(0, str(number), "init", [0, 1], f"rank 0: enough {number}")
    assert len(table.meetings._open) == MOST_REFUSED
    assert unmet(table.come(1, [0, 1], key="10")) == [((1,), "Aborted", "rank 0: enough 10", [0])]
    assert table.come(1, [0, 1], key="9") == []


def test_late_at_a_meeting_that_has_timed_out():
    table = Table()
    table.come(0, [0, 1, 2, 3])
    withdrawn = unmet(table.meetings.withdraw(0, "k", 3.0))
    assert unmet(table.come(1, [0, 1, 2, 3])) == [((1,), *withdrawn[0][1:])]
    table.gone[3] = "rank 3 ended without release"
    assert table.meetings.look() == []
    assert unmet(table.come(2, [0, 1, 2, 3])) == [((2,), *withdrawn[0][1:])]  # the last that can come
    table.gone.clear()
    assert table.come(3, [0, 1, 2, 3]) == []  # the first meeting is forgotten


def test_late_at_a_meeting_without_agreement():
    table = Table()
    table.come(0, [0, 1, 2], key="a", name="g")
    ((_, frame), _) = table.come(1, [0, 1], key="b", name="g")
    assert unmet(table.come(2, [0, 1, 2], key="a", name="g")) == [((2,), "Mismatch", frame["text"], [0, 1])]
    # Ranks that know of the mismatch may agree on any of the two lists.
    assert table.come(0, [0, 1], key="b", name="g") == []
    assert table.come(1, [0, 1], key="b", name="g")[0].frame["t"] == "met"


def test_ranks_that_create_groups_crosswise_are_told_at_once():
    table = Table()
    assert table.come(0, [0, 2], key="a", name="create_group('a')") == []
    assert table.come(1, [0, 1], key="b", name="create_group('b')") == []
    answers = unmet(table.come(2, [1, 2], key="c", name="create_group('c')"))
    assert sorted(ranks for ranks, *_ in answers) == [(0,), (1,), (2,)]
    text = "rank 0 waits in create_group('a'), and create_group('b') waits for it"
    assert all((kind, ranks) == ("Mismatch", [0, 1, 2]) and text in why for _, kind, why, ranks in answers)
    assert table.meetings.look() == []


def test_a_rank_with_more_threads_may_still_come_to_the_other_meeting():
    table = Table()
    for rank, key in ((0, "a"), (1, "b")):
        assert table.come(rank, [0, 1], key=key, name=key, alone=False) == []
    assert table.come(0, [0, 1], key="b", name="b", alone=False)[0].frame["t"] == "met"
    assert table.come(1, [0, 1], key="a", name="a", alone=False)[0].frame["t"] == "met"


def test_all_meetings_end_with_their_epoch():
    table = Table()
    table.come(0, [0, 1], key="a")
    table.come(2, [2, 3], key="b")
    over = list(table.meetings.clear(errors.PeerLost("another epoch has begun")))
    assert [ranks for ranks, *_ in unmet(over)] == [(0,), (2,)]
    assert table.meetings.look() == []


# -- over a hub


class Meeting:
    """Runs one rank's part of a meeting in a thread. Keeps the result, or the error that meet() raised."""

    def __init__(self, members, rank, ranks, *, key="", name="create_group('g')", timeout_s=60.0, survivors=False):
        self.result = self.error = None

        def meet():
            try:
                facts, deadline = {"rank": rank}, Deadline(timeout_s)
                words = key or f"0:g:{ranks}", name, ranks, facts, deadline
                self.result = members[rank][0].meet(*words, founds=not survivors, survivors=survivors)
            except errors.Error as error:
                self.error = error

        self.thread = threading.Thread(target=meet)
        self.thread.start()

    def ended(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self


def test_ranks_that_agree_meet():
    with Job(3) as job:
        members = job.joined()
        for meeting in [Meeting(members, rank, [2, 0]) for rank in (0, 2)]:
            assert meeting.ended().result == ([2, 0], [{"rank": 2}, {"rank": 0}]), meeting.error


def test_differing_lists_are_a_mismatch_on_both():
    with Job(3) as job:
        members = job.joined()
        for meeting in [Meeting(members, 0, [0, 1]), Meeting(members, 1, [0, 1, 2])]:
            assert isinstance(meeting.ended().error, errors.Mismatch)
            assert "named [0, 1]" in str(meeting.error) and "named [0, 1, 2]" in str(meeting.error)
            assert meeting.error.ranks in [(0, 1), (1, 0)]


def test_a_lost_rank_ends_the_meetings_that_need_it():
    with Job(4) as job:
        members = job.joined()
        waiting = Meeting(members, 0, [0, 1])
        others = Meeting(members, 2, [2, 3])
        members[1][0].close()
        assert isinstance(waiting.ended().error, errors.PeerLost)
        assert waiting.error.ranks == (1,)
        late = Meeting(members, 2, [1, 2]).ended()
        assert isinstance(late.error, errors.PeerLost)
        last = Meeting(members, 3, [2, 3]).ended()
        assert last.result and others.ended().result == last.result


def test_a_time_out_is_one_on_every_rank_that_came():
    with Job(3) as job:
        members = job.joined()
        other = Meeting(members, 1, [0, 1, 2], timeout_s=60)
        eventually(lambda: job.hub._meetings._open)
        for meeting in (Meeting(members, 0, [0, 1, 2], timeout_s=0.3), other):
            assert isinstance(meeting.ended().error, errors.CollectiveTimeout)
            assert meeting.error.waiting_for == (2,)
            assert "waited 0.3 s for rank 2 (pid" in str(meeting.error)


def test_a_late_answer_does_not_count_for_the_next_attempt(monkeypatch):
    monkeypatch.setattr("mscomm.cluster.member.SETTLE_S", 0.1)
    with Job(2) as job:
        members = job.joined()
        stopped, goes_on = threading.Event(), threading.Event()
        job.hub._order(lambda: (stopped.set(), goes_on.wait(60)))
        assert stopped.wait(60)
        first = Meeting(members, 0, [0, 1], timeout_s=0.1).ended().error
        assert isinstance(first, errors.CollectiveTimeout)
        assert "waited 0.1 s for the other ranks, and the scheduler did not say within 0.1 s which ones" in str(first)
        goes_on.set()
        assert isinstance(Meeting(members, 1, [0, 1]).ended().error, errors.CollectiveTimeout)  # it comes too late
        both = [Meeting(members, rank, [0, 1]) for rank in range(2)]
        assert [one.ended().error for one in both] == [None, None]


def test_survivors_meet_without_the_lost():
    with Job(3) as job:
        members = job.joined()
        members[1][0].close()
        eventually(lambda: members[0][1].aborts and members[2][1].aborts)
        meetings = [Meeting(members, rank, [0, 1, 2], key="0:shrink", survivors=True) for rank in (0, 2)]
        for meeting in meetings:
            assert meeting.ended().result.ranks == [0, 2]


def test_a_failure_of_a_group_is_no_failure_of_the_others():
    with Job(3) as job:
        members = job.joined()
        for meeting in [Meeting(members, rank, [0, 1], key="0:g:1") for rank in (0, 1)]:
            assert meeting.ended().result
        members[0][0].report(errors.Aborted("rank 0 gave the pair up", [0]), "0:g:1")
        with pytest.raises(errors.Aborted, match="gave the pair up"):
            eventually(lambda: members[1][0].check("0:g:1"))
        assert not members[1][1].aborts and not members[2][1].aborts


@pytest.mark.parametrize("ranks", [[0, 0], [0, 9], [1, 2], [0, "1"]])
def test_a_list_that_makes_no_sense_loses_the_rank_that_sent_it(ranks):
    with Job(3) as job:
        members = job.joined()
        meeting = Meeting(members, 0, ranks)
        eventually(lambda: members[2][1].aborts)
        assert (members[2][1].aborts[0].kind, members[2][1].aborts[0].ranks) == ("PeerLost", (0,))
        assert "sent invalid data" in str(members[2][1].aborts[0])
        assert isinstance(meeting.ended().error, errors.Error)


def test_a_rank_that_left_well_is_not_waited_for():
    with Job(2) as job:
        members = job.joined()
        members[1][0].leave(3)
        meeting = Meeting(members, 0, [0, 1]).ended()
        assert isinstance(meeting.error, errors.PeerLost)
        assert "has left the job" in str(meeting.error)


def test_an_abort_ends_the_meetings_and_those_that_come():
    with Job(3) as job:
        members = job.joined()
        waiting = Meeting(members, 1, [0, 1, 2])
        eventually(lambda: job.hub._meetings._open)
        members[0][0].report(errors.Aborted("rank 0: KeyError: 'a'", [0]))
        members[0][0].leave(0)  # may arrive at the hub together with the report, but the report's error must count
        later = Meeting(members, 2, [0, 1, 2], key="0:shrink", survivors=True)
        for meeting in (waiting, later):
            assert isinstance(meeting.ended().error, errors.Aborted)
            assert str(meeting.error) == "rank 0: KeyError: 'a'"
            assert (meeting.error.ranks, meeting.error.waiting_for) == ((0,), ())


def test_a_rank_that_left_is_behind_in_a_group_by_the_number_of_that_group():
    with Job(3) as job:
        members = job.joined()
        for meeting in [Meeting(members, rank, [0, 1, 2], key="0:g:1") for rank in range(3)]:
            assert meeting.ended().result
        for rank, place in enumerate([(3, True, ""), (3, True, ""), (2, False, "")]):
            members[rank][0].attach("0:g:1", Communicator(place), NoLinks())
        members[2][0].leave(90)  # 90 is the number of calls in the world, not in the group
        error = members[0][0].settle("0:g:1", errors.CollectiveTimeout("barrier #3 took over 1 s"), 3)
        assert error.waiting_for == (2,)
        assert "ended well after call #2" in str(error)
