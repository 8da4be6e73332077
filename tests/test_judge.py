"""The judge: which failure was the first."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

from mscomm.cluster.judge import _CLOSED, Judge, Progress
from mscomm.errors import make


def judge(members=(0, 1, 2), watched=False):
    return Judge(lambda rank: f"rank {rank}", lambda: members, watched=watched)


def same(error, kind, ranks, text):
    return error.fields() == {"kind": kind, "ranks": ranks, "waiting_for": (), "text": text}


def test_an_explicit_cause_counts_at_once_and_only_the_first():
    court = judge()
    court.failed(1, make("Mismatch", "the messages differ", [1]), -1, now=0)
    court.failed(2, make("Aborted", "later", [2]), 4, now=0)
    assert same(court.verdict, "Mismatch", (1,), "the messages differ")


def test_a_symptom_waits_for_what_the_lost_rank_says():
    court = judge()
    court.failed(0, make("PeerLost", "link to rank 2 ended", [2]), 4, now=0)
    assert court.verdict is None
    court.failed(2, make("Aborted", "ValueError in rank 2", [2]), 4, now=0.1)
    assert str(court.verdict) == "ValueError in rank 2"


def test_a_symptom_is_believed_after_200_ms():
    court = judge()
    court.failed(0, make("PeerLost", "link to rank 2 ended", [2]), 4, now=0)
    court.look(0.19)
    assert court.verdict is None
    court.look(court.due())
    assert same(court.verdict, "PeerLost", (2,), "link to rank 2 ended")


def test_the_end_of_a_control_link_settles_a_symptom():
    court = judge()
    court.failed(0, make("PeerLost", "link to rank 2 ended", [2]), 4, now=0)
    court.gone(2, "ended without release", now=0.01)
    assert same(court.verdict, "PeerLost", (2,), "rank 2 ended without release")


def test_an_explicit_cause_after_a_loss_is_its_consequence():
    court = judge(watched=True)
    court.gone(1, "ended without release", now=0)
    court.failed(2, make("Aborted", "PeerLost in rank 2, which nobody caught", [2]), -1, now=0.01)
    assert court.verdict is None
    court.process_ended(1, "killed by SIGKILL", True, now=0.02)
    assert same(court.verdict, "PeerLost", (1,), "rank 1 ended without release: killed by SIGKILL")


def test_a_chain_of_symptoms_ends_at_the_rank_that_was_silent():
    court = judge()
    court.failed(0, make("PeerLost", "link to rank 1 ended", [1]), 4, now=0)
    court.failed(1, make("PeerLost", "link to rank 2 ended", [2]), 4, now=0.01)
    court.gone(1, "ended without release", now=0.02)  # rank 1 reported before it ended, so it is not the cause
    court.look(0.21)
    assert court.verdict.ranks == (2,)


def test_two_that_lost_each_other_do_not_wait():
    court = judge((0, 1))
    court.failed(0, make("PeerLost", "link to rank 1 ended", [1]), 4, now=0)
    court.failed(1, make("PeerLost", "link to rank 0 ended", [0]), 4, now=0.01)
    assert court.verdict.ranks == (1,)


def test_in_a_circle_of_symptoms_a_closed_link_is_not_the_cause():
    """Ranks 0 and 1 are cut off from each other. Rank 1 notices this first, and closes its links."""
    reports = [
        (0, make("PeerLost", "the link to rank 2 ended: closed by the other side", [2])),
        (2, make("PeerLost", "the link to rank 1 ended: Broken pipe", [1])),
        (1, make("PeerLost", "the link to rank 0 ended: its host has acknowledged nothing for 4 s", [0])),
    ]
    # The judge looks for these words, so they must be those that the core and the kernel use.
    stream = (Path(__file__).parent.parent / "csrc/net/stream.cc").read_text()
    assert (f'"{_CLOSED[0]}"' in stream) and _CLOSED[1:] == (os.strerror(errno.EPIPE), os.strerror(errno.ECONNRESET))
    for order in itertools.permutations(reports):
        court = judge()
        for rank, error in order:
            court.failed(rank, error, 4, now=0)
        assert court.verdict.ranks == (0,)


def test_needing_a_rank_that_left_is_no_symptom():
    court = judge((0, 1))
    court.left(2, 3, now=0)
    court.failed(0, make("PeerLost", "rank 2 left", [2]), 4, now=0)
    assert str(court.verdict).endswith("rank 2 left")


def test_a_deadline_names_who_is_silent_or_behind_and_not_who_waits_too():
    court = judge((0, 1, 2, 3, 5))
    court.left(4, 6, now=0)
    court.left(6, 7, now=0)  # rank 6 has made the call
    court.failed(0, make("CollectiveTimeout", "all_reduce #7 took over 5 s", []), 7, now=0)
    assert court.ask is not None
    court.here(
        0, Progress(7, False, "after it failed"), now=0.01
    )  # the judge ignores this answer, because rank 0 itself has timed out
    court.here(1, Progress(7, True, ""), now=0.01)
    court.here(2, Progress(6, False, "computes"), now=0.01)
    court.here(5, Progress(7, False, "has ended it"), now=0.01)
    assert court.verdict is None
    court.look(0.3)
    assert court.verdict.kind == "CollectiveTimeout"
    assert court.verdict.waiting_for == (2, 3, 4)
    assert str(court.verdict) == (
        "all_reduce #7 took over 5 s. Waiting for: rank 2: computes; rank 3: gave no sign of life within 0.3 s; "
        "rank 4: ended well after call #6"
    )


def test_a_deadline_is_decided_when_all_have_answered():
    court = judge()
    court.failed(0, make("CollectiveTimeout", "late", []), 7, now=0)
    court.here(1, Progress(6, True, ""), now=0.01)
    court.failed(2, make("CollectiveTimeout", "late too", []), 7, now=0.02)
    assert court.verdict.waiting_for == (1,)


def test_the_launcher_has_half_a_second_to_say_how_a_process_ended():
    court = judge(watched=True)
    court.gone(1, "ended without release", now=0)
    assert court.verdict is None
    court.process_ended(1, "killed by SIGKILL", badly=True, now=0.4)
    assert str(court.verdict) == "rank 1 ended without release: killed by SIGKILL"
    court = judge(watched=True)
    court.gone(1, "ended without release", now=0)
    court.look(0.5)
    assert str(court.verdict) == "rank 1 ended without release"


def test_a_rank_that_destroyed_the_group_is_said_to_have_done_so():
    court = judge((0, 1), watched=True)
    court.left(2, 3, now=0, destroyed=True)
    court.failed(0, make("PeerLost", "rank 2 has left the job, but barrier #4 waits for it", [2]), 4, now=0)
    assert str(court.verdict) == "rank 2 has destroyed the group, but barrier #4 waits for it"
    court = judge((0, 1))
    court.failed(0, make("PeerLost", "link to rank 2 ended", [2]), 4, now=0)
    court.left(2, 3, now=0, destroyed=True)
    assert str(court.verdict) == "rank 2 has destroyed the group; link to rank 2 ended"
    court = judge((0,))
    court.left(2, 3, now=0, destroyed=True)
    court.failed(0, make("CollectiveTimeout", "late", []), 4, now=0)
    assert (court.verdict.waiting_for, str(court.verdict)) == (
        (2,),
        "late. Waiting for: rank 2: destroyed the group after call #3",
    )


def test_a_loss_without_a_name_waits_for_one_that_has():
    """NCCL reports that some rank is lost, but not which one. So the judge waits for a report that names the rank."""
    court = judge()
    court.failed(0, make("PeerLost", "rank 0: nccl: remote process exited", []), 4, now=0)
    assert court.verdict is None
    court.gone(2, "ended without release", now=0.01)
    assert same(court.verdict, "PeerLost", (2,), "rank 2 ended without release")


def test_a_loss_without_a_name_is_believed_after_200_ms():
    court = judge()
    court.failed(0, make("PeerLost", "rank 0: nccl: remote process exited", []), 4, now=0)
    court.look(court.due())
    assert same(court.verdict, "PeerLost", (), "rank 0: nccl: remote process exited")


def test_a_rank_that_is_stuck_makes_all_tell_their_calls():
    court = judge()
    court.compare(0, 5, "all_reduce #5", now=0)
    assert court.ask == 5
    court.called(1, 5, "", now=0.1)  # the empty text means that rank 1 has not made call #5 yet
    court.called(2, 5, "all_reduce #5", now=0.1)
    assert court.verdict is None
    court.ask = None
    court.compare(2, 5, "all_reduce #5", now=0.5)
    assert court.ask is None  # the hub does not ask again, because it asked all ranks a moment ago
    court.compare(2, 5, "all_reduce #5", now=2)
    assert court.ask is not None  # the hub asks again, because rank 1 may have reached the call by now
    court.called(1, 5, "all_gather #5", now=2)
    assert court.verdict.kind == "Mismatch" and court.verdict.ranks == (1,)
    assert "ranks 0, 2 called all_reduce #5; rank 1 called all_gather #5" in str(court.verdict)


def between_two(ranks):
    """Return the error of a rank that compared its call with that of one peer only, as over the mesh."""
    text = f"the ranks of group world made different calls: rank {ranks[0]} called b #5; rank {ranks[1]} called a #5"
    return make("Mismatch", text, ranks[1:])


def test_a_mismatch_names_the_calls_of_all_ranks():
    court = judge((0, 1, 2, 3))
    court.called(3, 5, "a #5", now=0)
    court.failed(3, between_two([1, 3]), 5, now=0)
    assert court.verdict is None and court.ask == 5
    court.failed(1, make("PeerLost", "link to rank 3 ended", [3]), 5, now=0.01)
    for rank, call in ((0, "a #5"), (1, "b #5")):
        court.called(rank, 5, call, now=0.1)
    assert court.verdict is None  # the call of rank 2 is not known
    court.called(2, 5, "a #5", now=0.2)
    assert court.verdict.ranks == (1,)
    assert "the ranks of group world made different calls: ranks 0, 2, 3 called a #5; rank 1 called b #5" in str(
        court.verdict
    )


def test_a_mismatch_waits_1_s_for_ranks_that_have_not_made_the_call():
    court = judge((0, 1, 2, 3))
    court.called(3, 5, "a #5", now=0)
    court.failed(3, between_two([1, 3]), 5, now=0)
    court.called(1, 5, "b #5", now=0.01)
    court.called(2, 5, "", now=0.01)
    court.gone(0, "ended without release", now=0.01)
    court.look(0.99)
    assert court.verdict is None
    court.look(1.0)
    assert court.verdict.ranks == (3,) and "rank 1 called b #5; rank 3 called a #5" in str(court.verdict)


def test_after_a_mismatch_ranks_that_have_not_made_the_call_are_asked_again():
    court = judge((0, 1, 2))
    court.called(0, 5, "a #5", now=0)
    court.failed(0, between_two([0, 1]), 5, now=0)
    court.called(1, 5, "b #5", now=0.01)
    court.called(2, 5, "", now=0.01)
    asked = []
    while court.verdict is None and len(asked) < 100:
        court.ask = None
        now = court.due()
        court.look(now)
        if court.ask == 5:
            asked.append(now)
    assert 3 <= len(asked) <= 8 and asked[0] < 0.1 and court.verdict is not None

    court = judge((0, 1, 2))
    court.called(0, 5, "a #5", now=0)
    court.failed(0, between_two([0, 1]), 5, now=0)
    court.called(1, 5, "b #5", now=0.01)
    court.look(court.due())
    court.called(2, 5, "a #5", now=0.1)
    assert "ranks 0, 2 called a #5; rank 1 called b #5" in str(court.verdict)


def test_a_mismatch_of_calls_with_equal_texts_is_raised_as_reported():
    court = judge((0, 1))
    court.failed(1, make("Mismatch", "out has shape (2,) on rank 1", [1]), 5, now=0)
    court.called(0, 5, "scatter #5", now=0)
    court.called(1, 5, "scatter #5", now=0)
    assert same(court.verdict, "Mismatch", (1,), "out has shape (2,) on rank 1")


def test_what_comes_after_a_mismatch_does_not_replace_it():
    def differing():
        court = judge((0, 1, 2, 3))
        court.called(3, 5, "a #5", now=0)
        court.failed(3, between_two([1, 3]), 5, now=0)
        court.called(1, 5, "b #5", now=0)
        return court

    court = differing()
    court.failed(0, make("Aborted", "rank 0 gives up", [0]), -1, now=0.1)
    # The verdict comes at once, because the hub now sends the Aborted to all ranks, and the Mismatch must come first.
    assert court.verdict.kind == "Mismatch"
    court = differing()
    court.left(2, 3, now=0.1)
    court.process_ended(2, "exit code 3", True, now=0.2)
    assert court.verdict is None
    court.failed(0, make("PeerLost", "link to rank 1 ended", [1]), 4, now=0.3)  # rank 0 will never make call 5
    assert court.verdict.kind == "Mismatch" and court.verdict.ranks == (3,)
    court = differing()
    court.ask = None
    court.compare(2, 9, "c #9", now=0.1)
    assert court.ask is None


def test_a_mismatch_during_set_up_counts_at_once():
    court = judge()
    court.failed(1, make("Mismatch", "the ranks differ in version", [1]), 0, now=0)
    assert same(court.verdict, "Mismatch", (1,), "the ranks differ in version")


def test_a_mismatch_explains_a_timeout():
    court = judge((0, 1))
    court.failed(0, make("CollectiveTimeout", "all_reduce #6 timed out", [0]), 6, now=0)
    court.failed(1, between_two([0, 1]), 5, now=0.1)
    court.look(1.1)
    assert court.verdict.kind == "Mismatch"


def test_calls_of_different_numbers_are_not_compared():
    court = judge((0, 1))
    for number in range(100):
        court.compare(0, number, f"all_reduce #{number}", now=0)
    court.compare(1, 3, "all_gather #3", now=0)
    assert court.verdict is None  # the judge has forgotten call 3 of rank 0, which was 96 calls ago
