"""Ranks that come back to a hub: which ones it admits again, when the next epoch begins, and when none can begin."""

from __future__ import annotations

import re
import socket

import pytest
from control import Communicator, Job, NoLinks, Waits, eventually, greeted, soon

from mscomm import errors
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frames
from mscomm.cluster.hello import LAUNCHER
from mscomm.cluster.launchers import State
from mscomm.cluster.plan import world_id
from mscomm.cluster.roster import Link, Roster


def facts(size, **more):
    return {"size": size, "pid": 1, "hostname": "h", "host": "h", **more}


def lose(job, rank, how="killed by SIGKILL", **words):
    """Act as if the rank's process had died: close its link, and tell the hub how the process ended, as a launcher
    does.
    """
    job.members[rank].close() if rank < len(job.members) else job.ends[rank].close()
    job.hub.process_ended(rank, how, badly=True, **words)


def by_rank(job):
    """Sort the list job.members by rank, and return it. Job keeps them in the order in which it created them."""
    job.members.sort(key=lambda member: member._welcome.rank)
    return job.members


def test_a_lost_rank_is_admitted_again_and_all_begin_a_new_epoch():
    with Job(3, watched=True, restarts=True) as job:
        communicators = [communicator for _, communicator in job.joined()]
        members = by_rank(job)
        lose(job, 1, again=True)
        eventually(lambda: communicators[0].aborts and communicators[2].aborts)
        assert (communicators[0].aborts[0].kind, communicators[0].aborts[0].ranks) == ("PeerLost", (1,))
        waiting = [Waits(members[rank].rejoin, facts(3, colour=rank), soon()) for rank in (0, 2)]
        new = Waits(job.again(1).join, facts(3, colour="new"), soon())
        for rank, wait in zip((0, 2, 1), (*waiting, new), strict=True):
            welcome = wait.ended().result
            assert (welcome.rank, welcome.size, welcome.epoch) == (rank, 3, 1), wait.error
            assert [fact["colour"] for fact in welcome.facts] == [0, "new", 2]
        # Attach the new epoch's world on each rank. From then on, the rank learns of failures in this group.
        for member in (members[0], members[2], job.members[-1]):
            member.attach(world_id(1), Communicator(), NoLinks())
        ready = [Waits(member.ready, soon()) for member in (members[0], members[2], job.members[-1])]
        assert [wait.ended().error for wait in ready] == [None] * 3
        members[0].report(errors.Aborted("enough", [0]), world_id(1))
        with pytest.raises(errors.Aborted, match="enough"):
            eventually(lambda: job.members[-1].check(world_id(1)))
        assert job.hub.state.over is None


def test_a_newcomer_hears_nothing_of_the_epoch_before_its_own():
    with Job(3, watched=True, restarts=True) as job:
        job.joined()
        members = by_rank(job)
        lose(job, 1, again=True)
        new = Waits(job.again(1).join, facts(3), soon())
        eventually(lambda: any("joined, 3 of 3" in line for line in job.log[-3:]))
        # Rank 0 reports a failure to all groups of the old epoch. The restarted rank 1 must not learn of it.
        members[0].report(errors.Aborted("of the old epoch", [0]))
        waiting = [Waits(members[rank].rejoin, facts(3), soon()) for rank in (0, 2)]
        assert [wait.ended().result.epoch for wait in (new, *waiting)] == [1, 1, 1]


def test_who_waits_for_the_next_epoch_takes_part_in_nothing_of_this_one():
    with Job(3, restarts=True, watched=True) as job:
        job.joined()
        members = by_rank(job)
        meeting = Waits(lambda: members[0].meet("k", "create_group('g')", [0, 2], {}, soon(), founds=True))
        rejoining = Waits(members[2].rejoin, facts(3), soon())
        assert isinstance(meeting.ended().error, errors.PeerLost)
        assert "waits for the next epoch of the job: call rejoin() too" in str(meeting.error)
        others = [Waits(members[rank].rejoin, facts(3), soon()) for rank in (0, 1)]
        assert [wait.ended().result.epoch for wait in (rejoining, *others)] == [1, 1, 1]


def test_a_rank_that_closes_a_group_before_it_rejoins_is_no_culprit():
    with Job(4, watched=True, restarts=True) as job:
        job.joined()
        members = by_rank(job)
        pair = {rank: Communicator((0, True, "is in barrier #1")) for rank in (1, 3)}
        founding = [
            Waits(lambda member=members[rank]: member.meet("k", "pair", [1, 3], {}, soon(), founds=True))
            for rank in pair
        ]
        for wait in founding:
            assert wait.ended().error is None
        for rank, communicator in pair.items():
            members[rank].attach("k", communicator, NoLinks())
        lose(job, 0, again=True)
        eventually(lambda: any("verdict on" in line for line in job.log))
        members[1].detach("k")  # rank 1 has begun rejoin(), whose first step is detach()
        eventually(lambda: pair[3].departed == [1])
        error = members[3].settle("k", errors.PeerLost("rank 1 has left the job", [1]), 1)
        assert error.ranks == (0,)
        assert re.search(r"rank 1 \(.*\) therefore left this group for the next epoch$", str(error))


def test_a_rank_that_is_lost_for_good_ends_the_waiting():
    with Job(3, watched=True, restarts=True) as job:
        job.joined()
        members = by_rank(job)
        lose(job, 1, again=True)
        waiting = Waits(members[0].rejoin, facts(3), soon())
        new = Waits(job.again(1).join, facts(3), soon())
        lose(job, 2, "exit code 3")
        for wait in (waiting, new):
            assert isinstance(wait.ended().error, errors.PeerLost)
            assert wait.error.ranks == (2,)
            assert "exit code 3, and it is not started again" in str(wait.error)
        assert job.hub.state.over.ranks == job.hub.verdict.ranks == (2,)
        assert not job.hub.can_restart
        late = Waits(job.again(2).join, facts(3), soon()).ended()
        assert late.error.ranks == (2,)


def test_without_restarts_nobody_rejoins_and_a_newcomer_gets_the_verdict():
    with Job(3, watched=True) as job:
        job.joined()
        members = by_rank(job)
        lose(job, 1)
        alone = Waits(members[0].rejoin, facts(3), soon()).ended()
        assert isinstance(alone.error, errors.PeerLost)
        assert "mscomm run --max-restarts N" in str(alone.error)
        new = Waits(job.again(1).join, facts(3), soon()).ended()
        assert isinstance(new.error, errors.PeerLost)
        assert "killed by SIGKILL" in str(new.error)


def test_a_time_out_names_those_that_are_not_there():
    with Job(4, watched=True, restarts=True) as job:
        job.joined()
        members = by_rank(job)
        lose(job, 1, again=True)
        first = Waits(members[0].rejoin, facts(4), Deadline(0.2)).ended()
        assert isinstance(first.error, errors.CollectiveTimeout)
        assert first.error.waiting_for == (1, 2, 3)
        assert "which was not restarted, or has not called init() yet, rank 2" in str(first.error)
        waiting = [Waits(members[rank].rejoin, facts(4), soon()) for rank in (0, 2, 3)]  # a second attempt
        new = Waits(job.again(1).join, facts(4), soon())
        assert {wait.ended().result.epoch for wait in (new, *waiting)} == {1}


def test_who_gives_up_its_set_up_is_not_waited_for_by_the_others():
    with Job(2, watched=True, restarts=True) as job:
        job.joined()
        members = by_rank(job)
        for wait in [Waits(member.rejoin, facts(2), soon()) for member in members]:
            assert wait.ended().result.epoch == 1
        setting_up = Waits(members[0].ready, soon())
        # Rank 1 calls rejoin() again, as if a signal had interrupted it while it set up the epoch.
        once_more = Waits(members[1].rejoin, facts(2), soon())
        assert isinstance(setting_up.ended().error, errors.PeerLost)
        assert "gave up its set-up" in str(setting_up.error)
        both = Waits(members[0].rejoin, facts(2), soon())
        assert [wait.ended().result.epoch for wait in (once_more, both)] == [2, 2]


def test_a_rank_that_ended_well_is_never_there_again():
    with Job(2, watched=True, restarts=True) as job:
        job.joined()
        members = by_rank(job)
        members[1].leave(4)
        waiting = Waits(members[0].rejoin, facts(2), soon())
        job.hub.process_ended(1, "exit code 0")
        assert isinstance(waiting.ended().error, errors.PeerLost)
        assert "rank 1" in str(waiting.error) and "has left the job" in str(waiting.error)
        assert not job.hub.can_restart


def test_a_rank_that_said_bye_and_failed_comes_back():
    with Job(2, watched=True, restarts=True) as job:
        job.joined()
        members = by_rank(job)
        members[1].leave(4)
        waiting = Waits(members[0].rejoin, facts(2), soon())
        job.hub.process_ended(1, "exit code 1", badly=True, again=True)
        new = Waits(job.again(1).join, facts(2), soon())
        assert [wait.ended().result.epoch for wait in (waiting, new)] == [1, 1]


def test_a_rank_that_is_lost_before_all_have_joined_is_waited_for():
    with Job(3, watched=True, restarts=True) as job:
        first = Waits(job.member(0).join, facts(3), soon())
        second = job.member(1)
        joining = Waits(second.join, facts(3), soon())
        eventually(lambda: any("2 of 3" in line for line in job.log))
        second.close()
        joining.ended()
        job.hub.process_ended(1, "exit code 1", badly=True, again=True)
        others = [Waits(job.again(1).join, facts(3), soon()), Waits(job.member(2).join, facts(3), soon())]
        assert [wait.ended().result.epoch for wait in (first, *others)] == [0, 0, 0]


def test_a_newcomer_takes_no_seat_of_another_member():
    """Rank 0 is lost before the job begins, and its successor joins after ranks 1 and 2. Later, rank 2 is lost, too."""
    roster = Roster(3, ranks_known=True)

    def admitted(rank):
        link = Link(ByteStream(socket.socket()), None, False)
        assert roster.admit(link, rank, None, facts(3)) is None
        return link

    early, one, two = map(admitted, range(3))
    roster.forget(early)
    zero = admitted(0)
    two.open = False
    again = admitted(2)
    assert sorted(roster, key=lambda link: link.rank) == [zero, one, again]
    for link in (early, zero, one, two, again):
        link.stream.close()


def test_a_rank_that_is_lost_before_all_have_joined_and_for_good_is_told():
    with Job(3, watched=True, restarts=True) as job:
        first = Waits(job.member(0).join, facts(3), soon())
        eventually(lambda: any("1 of 3" in line for line in job.log))
        job.ends[1].close()
        job.hub.process_ended(1, "exit code 1", badly=True)
        assert isinstance(first.ended().error, errors.PeerLost)
        assert first.error.ranks == (1,)


def test_a_worker_comes_back_under_its_id():
    with Job(2, ranks_known=False, tcp=True, restarts=True) as job:
        job.joined(ids=["b", "a"])
        members = by_rank(job)
        assert members[0].node_id == "a"
        members[1].close()
        eventually(lambda: any("ended without release" in line for line in job.log))
        waiting = Waits(members[0].rejoin, facts(2), soon())
        stranger = Waits(job.member(node_id="c").join, facts(2), soon()).ended()
        assert "already has its 2 workers" in str(stranger.error)
        new = Waits(job.member(node_id="b").join, facts(2), soon()).ended()
        assert (new.result.rank, new.result.epoch) == (1, 1), new.error
        assert waiting.ended().result.epoch == 1


# -- launchers of other hosts


# The ranks on each node whose launcher connects to the hub. The hub itself is on node 0, which has no ranks.
NODES = {"node 1": range(2), "node 2": range(2, 4)}


class Launcher:
    """A launcher's link to the hub. The launcher makes this link before it starts its ranks."""

    def __init__(self, job, ranks):
        self.frames = Frames(greeted(job.listener.getsockname(), purpose=LAUNCHER))
        job.links.append(self.frames)
        self.frames.send(
            {"t": "attend", "first": ranks.start, "end": ranks.stop, "name": "node 1", "layout": ""}, soon()
        )

    def hears(self):
        return self.frames.receive(soon())

    def ended(self, rank, how, badly=True, again=False):
        self.frames.send({"t": "ended", "rank": rank, "how": how, "badly": badly, "again": again}, soon())


def test_a_launcher_names_how_its_ranks_ended_and_hears_that_the_job_is_over():
    with Job(4, tcp=True, watched=True, nodes=NODES) as job:
        here, there = Launcher(job, range(2)), Launcher(job, range(2, 4))
        assert here.hears() == there.hears() == {"t": "state", **State()._asdict()}
        communicators = [communicator for _, communicator in job.joined()]
        by_rank(job)[3].close()
        there.ended(3, "exit code 7")
        assert here.hears()["complete"] == 1
        over = here.hears()["over"]
        assert (over["kind"], over["ranks"]) == ("PeerLost", [3])
        assert over["text"].endswith("ended without release: exit code 7")
        eventually(lambda: communicators[0].aborts)
        assert communicators[0].aborts[0].fields() == errors.of_fields(over).fields()
        late = Launcher(job, range(2, 4))
        assert late.hears()["over"] == over


def test_ranks_that_said_bye_have_ended_well_though_their_launcher_is_cut_off():
    with Job(4, tcp=True, watched=True, restarts=True, nodes=NODES) as job:
        here, there = Launcher(job, range(2)), Launcher(job, range(2, 4))
        here.hears()
        there.hears()
        job.joined()
        members = by_rank(job)
        for rank in (2, 3):
            members[rank].leave(0)
        there.frames.close()
        for rank in (0, 1):
            members[rank].leave(0)
            here.ended(rank, "exit code 0", badly=False)
        job.thread.join(60)
        assert job.outcome.ok and job.hub.state.over is None, job.outcome


@pytest.mark.parametrize("ranks", [range(2), range(1, 3), range(3, 5), range(2, 2), range(-1, 1), range(2, 4)], ids=str)
def test_a_launcher_with_ranks_of_another_or_none_is_refused(ranks):
    with Job(4, tcp=True, watched=True, nodes={"node 1": range(2, 4)}) as job:
        there = Launcher(job, range(2, 4))
        there.hears()
        communicators = [communicator for _, communicator in job.joined()]
        second = Launcher(job, ranks)
        refused = second.hears()
        assert refused["t"] == "refused"
        why = "node 1 has rank 2 already" if ranks == range(2, 4) else "this job has no other host with these ranks"
        assert why in refused["why"]
        assert second.hears() is None
        assert job.hub.state.over is None and not any(one.aborts for one in communicators)


def test_ranks_that_never_joined_are_named_to_launchers_too():
    with Job(4, tcp=True, watched=True, nodes=NODES) as job:
        here, there = Launcher(job, range(2)), Launcher(job, range(2, 4))
        here.hears()
        there.ended(2, "exit code 7")
        assert here.hears()["over"]["text"].startswith("rank 2: exit code 7")


def test_launchers_hear_of_the_end():
    with Job(2, tcp=True, watched=True, nodes={"node 1": range(1, 2)}) as job:
        there = Launcher(job, range(1, 2))
        there.hears()
        for member, _ in job.joined():
            member.leave(0)
        assert there.hears()["complete"] == 1
        assert there.hears() == {"t": "end"}
        there.frames.close()
        assert job.settled().ok


def test_a_launcher_speaks_for_its_own_ranks_alone():
    with Job(4, tcp=True, watched=True, nodes={"node 1": range(2, 4)}) as job:
        there = Launcher(job, range(2, 4))
        there.hears()
        there.ended(0, "exit code 7")
        assert there.hears() is None
        # The hub closes the launcher's link. This ends the job, because the launcher's ranks have not joined yet.
        eventually(lambda: job.hub.state.over)
        assert job.hub.state.over.ranks == (2,)


def test_ranks_of_a_launcher_that_is_gone_do_not_come_back():
    with Job(2, tcp=True, watched=True, restarts=True, nodes={"node 1": range(1, 2)}) as job:
        there = Launcher(job, range(1, 2))
        there.hears()
        job.joined()
        members = by_rank(job)
        members[1].close()
        waiting = Waits(members[0].rejoin, facts(2), soon())
        there.frames.close()
        assert isinstance(waiting.ended().error, errors.PeerLost)
        assert waiting.error.ranks == (1,)
