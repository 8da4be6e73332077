"""A scheduler that ends and is started again: its recovery file, and the ranks that return to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from control import ADMISSION, KEY, Communicator, Job, NoLinks, Waits, eventually, greeted, soon
from sessions import clean_environment

from mscomm import errors
from mscomm.cluster import judge, recovery_file, returning, security
from mscomm.cluster.frames import Frames
from mscomm.cluster.hello import CONTROL, DATA
from mscomm.cluster.hub import Hub
from mscomm.cluster.member import Member
from mscomm.cluster.plan import world_id
from mscomm.cluster.recovery_file import Membership, RecoveryFile, Seat

JOB = {"port": 8117, "workers": 2}
SEATS = [
    Seat(0, "worker_0", b"a" * 16, {"pid": 7, "hostname": "h"}, left=False),
    Seat(1, None, b"b" * 16, {"pid": 8, "hostname": "h", "memory": b"not kept"}, left=True),
]
MEMBERSHIP = Membership(b"r" * 16, 3, True, SEATS)


# -- the recovery file


def written(folder):
    RecoveryFile(str(folder), JOB, KEY).write(MEMBERSHIP)
    return folder / recovery_file.NAME


def test_the_file_gives_back_the_membership_and_only_its_owner_can_read_it(tmp_path):
    path = written(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    found = RecoveryFile(str(tmp_path), JOB, KEY).found
    assert (found.run, found.epoch, found.ready) == (b"r" * 16, 3, True)
    assert [(seat.rank, seat.node_id, seat.nonce, seat.left) for seat in found.seats] == [
        (0, "worker_0", b"a" * 16, False),
        (1, None, b"b" * 16, True),
    ]
    assert found.seats[1].facts == {"pid": 8, "hostname": "h"}


def test_an_ended_job_leaves_no_file(tmp_path):
    written(tmp_path)
    RecoveryFile(str(tmp_path), JOB, KEY).remove()
    assert RecoveryFile(str(tmp_path), JOB, KEY).found is None and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("job", "key", "error", "text"),
    [
        ({**JOB, "workers": 3}, KEY, errors.BackendUnavailable, "another job .*workers 2.*this job has .*workers 3"),
        (JOB, bytes(32), errors.AuthenticationError, "was changed, or written with another job key"),
    ],
)
def test_the_file_of_another_job_or_key_is_refused_and_kept(tmp_path, job, key, error, text):
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(error, match=text):
        RecoveryFile(str(tmp_path), job, key)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: b"\xff" + text,
        lambda text: b"[]",
        lambda text: b"[" * 100_000,
        lambda text: b'{"state": {"job": 3}, "mac": ""}',
    ],
)
def test_a_damaged_file_is_refused_and_kept(tmp_path, damage):
    path = written(tmp_path)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(errors.BackendUnavailable, match=r"it is damaged .*or, to start the job anew, remove"):
        RecoveryFile(str(tmp_path), JOB, KEY)
    assert path.read_bytes() == damaged


def test_no_value_in_the_file_can_be_changed(tmp_path):
    path = written(tmp_path)
    whole = json.loads(path.read_bytes())
    whole["state"]["seats"][0]["left"] = True
    path.write_text(json.dumps(whole))
    with pytest.raises(errors.AuthenticationError, match="was changed"):
        RecoveryFile(str(tmp_path), JOB, KEY)


def test_a_mac_that_cannot_be_encoded_is_refused(tmp_path):
    path = written(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"mac": "', b'"mac": "\\ud800'))
    with pytest.raises(errors.AuthenticationError, match="was changed"):
        RecoveryFile(str(tmp_path), JOB, KEY)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    written(tmp_path).chmod(0o644)
    with pytest.raises(errors.AuthenticationError, match="chmod 600"):
        RecoveryFile(str(tmp_path), JOB, KEY)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = written(tmp_path)
    before = path.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        RecoveryFile(str(tmp_path), JOB, KEY).write(Membership(b"s" * 16, 4, False, []))
    assert path.read_bytes() == before


def test_two_schedulers_cannot_use_one_folder(tmp_path):
    fd = recovery_file.lock(str(tmp_path / "new"))
    with pytest.raises(errors.BackendUnavailable, match="another scheduler uses this folder"):
        recovery_file.lock(str(tmp_path / "new"))
    os.close(fd)
    os.close(recovery_file.lock(str(tmp_path / "new")))
    (tmp_path / "file").touch()
    with pytest.raises(errors.BackendUnavailable, match=r"MS_RECOVERY_PATH=.*name a folder of your own"):
        recovery_file.lock(str(tmp_path / "file"))


# -- ranks that return


@pytest.fixture
def impatient(monkeypatch):
    """Let a scheduler that was started again wait only briefly before it gives up a rank that is believed lost."""
    monkeypatch.setattr(returning, "RETURN_S", 0.2)


@pytest.fixture
def patient(monkeypatch):
    """Let a scheduler that was started again wait for all ranks, for as long as a test runs."""
    monkeypatch.setattr(returning, "RETURN_S", 600.0)


class Cluster:
    """Hubs that follow each other at one port, and Members in the same process that return to the next hub."""

    def __init__(self, size, folder):
        self.size, self.folder, self.topo_timeout_s = size, str(folder), 60.0
        self.log: list[str] = []
        self.members: list[Member] = []
        self.outcome = self.hub = self.listener = None
        self.address = ("127.0.0.1", 0)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.end()
        for member in self.members:
            member.close()

    def start(self):
        """Start a hub, as a scheduler does that is started (again) by the same command."""
        self.recovery = RecoveryFile(self.folder, JOB, KEY)
        self.listener = socket.create_server(self.address)
        self.address = self.listener.getsockname()
        options = {"ranks_known": False, "restarts": True, "log": self.log.append, "recovery": self.recovery}
        self.hub = Hub(self.size, key=KEY, topo_timeout_s=self.topo_timeout_s, **options)
        self.hub.listen(self.listener)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        self.outcome = self.hub.serve()

    def end(self):
        """End the hub without a word to its ranks, as if its process had been killed."""
        self.listener.close()
        self.hub.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()

    def dial_again(self, run, deadline):
        try:
            return greeted(self.address, run=run)
        except OSError as error:
            time.sleep(0.01)
            raise errors.BackendUnavailable("no hub") from error

    @staticmethod
    def keep_away(member):
        """Return an event. Until it is set, the member does not find the next hub."""
        gate, dial = threading.Event(), member.dial_again

        def dial_later(run, deadline):
            gate.wait(60)
            return dial(run, deadline)

        member.dial_again = dial_later
        return gate

    @contextlib.contextmanager
    def losing(self, member, kind):
        """Let frames of this kind be lost on their way to the member. Then end the hub, when one has been lost."""
        lost, hears = threading.Event(), member._hear

        def hear(frame):
            if frame["t"] == kind:
                lost.set()
            else:
                hears(frame)

        member._hear = hear
        yield
        assert lost.wait(60)
        self.end()
        member._hear = hears

    def member(self, node_id):
        stream = greeted(self.address)
        member = Member(Frames(stream), key=ADMISSION[CONTROL], node_id=node_id, dial_again=self.dial_again)
        self.members.append(member)
        return member

    def joined(self):
        """Let all ranks join and become ready. Return a (Member, Communicator) for each rank."""
        members = [self.member(f"worker_{rank}") for rank in range(self.size)]
        for wait in [Waits(member.join, {"size": self.size}, soon()) for member in members]:
            assert wait.ended().error is None
        return self.set_up(members)

    def set_up(self, members):
        """Let the ranks, which have been welcomed, set up the world of their epoch."""
        communicators = [Communicator() for _ in members]
        epoch = members[0]._welcome.epoch
        meetings = []
        for member, communicator in zip(members, communicators, strict=True):
            meetings.append(Waits(self.found, member, communicator, world_id(epoch), range(self.size)))
        for wait in meetings:
            assert wait.ended().error is None
        for wait in [Waits(member.ready, soon()) for member in members]:
            assert wait.ended().error is None
        return list(zip(members, communicators, strict=True))

    def rejoined(self, members):
        """Let these ranks, which are all ranks of the job, call rejoin(). Return the epoch that each of them gets."""
        waiting = [Waits(member.rejoin, {"size": self.size}, soon()) for member in members]
        return [wait.ended().result.epoch for wait in waiting]

    @staticmethod
    def found(member, communicator, group, ranks):
        member.meet(group, group, list(ranks), {}, soon(), founds=True)
        member.attach(group, communicator, NoLinks())

    def returned(self, count):
        eventually(lambda: sum("is back" in line for line in self.log) == count)


def test_ranks_return_and_the_group_goes_on(tmp_path):
    with Cluster(3, tmp_path) as cluster:
        ranks = cluster.joined()
        cluster.end()
        cluster.start()
        cluster.returned(3)
        members = [member for member, _ in ranks]
        meetings = [Waits(member.meet, "k", "a meeting", [0, 1, 2], {}, soon()) for member in members]
        assert [wait.ended().result.ranks for wait in meetings] == [[0, 1, 2]] * 3
        for wait in [Waits(member.leave, 5) for member in members]:
            wait.ended()
        cluster.thread.join(60)
        assert cluster.outcome.ok, cluster.outcome
        assert not any(communicator.aborts for _, communicator in ranks)


class Dialled(NoLinks):
    def __init__(self):
        self.asked = []

    def dialled(self, rank, purpose, addresses):
        self.asked.append((rank, purpose, addresses))


def test_a_request_to_connect_waits_for_a_rank_that_returns_later(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        (early, _), (late, _) = cluster.joined()
        links = late._links[world_id(0)] = Dialled()
        gate = cluster.keep_away(late)
        cluster.end()
        eventually(lambda: late._away and early._away)
        asks = Waits(early.dial, world_id(0), 1, DATA, [["10.0.0.1", 4000]], soon())
        cluster.start()
        cluster.returned(1)
        assert asks.ended().error is None and not links.asked
        gate.set()
        eventually(lambda: links.asked)
        assert links.asked == [(0, DATA, [["10.0.0.1", 4000]])]


def test_a_rank_that_has_destroyed_a_group_need_not_ask_for_a_connection(tmp_path):
    """It may have set up the link already, when the request reaches the hub."""
    with Cluster(2, tmp_path) as cluster:
        (first, _), (second, _) = cluster.joined()
        found = [Waits(cluster.found, member, Communicator(), "0:g:1", [0, 1]) for member in (first, second)]
        assert [wait.ended().error for wait in found] == [None, None]
        links = second._links[world_id(0)] = Dialled()
        second.detach("0:g:1")
        eventually(lambda: cluster.hub._groups.get("0:g:1").closed)
        first.dial("0:g:1", 1, DATA, [], soon())
        first.dial(world_id(0), 1, DATA, [], soon())
        eventually(lambda: links.asked)  # so the hub has seen the first request, too
        assert cluster.hub._groups.get("0:g:1").judge.verdict is None and not second._early


def test_what_a_rank_asks_while_the_scheduler_is_away_is_answered_later(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        (first, _), (second, _) = cluster.joined()
        early = Waits(first.meet, "k", "a meeting", [0, 1], {"from": 0}, soon())
        eventually(lambda: "k" in cluster.hub._meetings._open)
        cluster.end()
        late = Waits(second.meet, "k", "a meeting", [0, 1], {"from": 1}, soon())
        eventually(lambda: first._away and second._away)
        cluster.start()
        assert early.ended().result.facts == late.ended().result.facts == [{"from": 0}, {"from": 1}]


def test_a_failure_while_the_scheduler_is_away_is_judged_when_it_is_back(tmp_path, impatient):
    """Rank 2 ends while the scheduler is away. Rank 0 sees it, and rank 1 does not. Both raise the same error."""
    with Cluster(3, tmp_path) as cluster:
        ranks = cluster.joined()
        cluster.end()
        ranks[2][0].close()
        symptom = errors.PeerLost("the link to rank 2 has ended", [2])
        settled = Waits(lambda: ranks[0][0].settle(world_id(0), symptom, 1))
        eventually(lambda: ranks[0][0]._away)
        cluster.start()
        verdict = settled.ended().result
        assert (verdict.kind, verdict.ranks) == ("PeerLost", (2,))
        assert "rank 2" in str(verdict) and "did not return to the scheduler" in str(verdict)
        eventually(lambda: ranks[1][1].aborts)
        assert ranks[1][1].aborts[0].ranks == (2,)
        # Its process is started again, and all begin the next epoch.
        survivors = [Waits(member.rejoin, {"size": 3}, soon()) for member, _ in ranks[:2]]
        new = Waits(cluster.member("worker_2").join, {"size": 3}, soon())
        assert [wait.ended().result.epoch for wait in (*survivors, new)] == [1, 1, 1]
        assert new.result.rank == 2
        # The restarted scheduler of the next epoch knows it, too.
        cluster.end()
        cluster.start()
        cluster.returned(5)


def test_nobody_is_believed_lost_before_the_ranks_could_return(tmp_path, patient):
    """Rank 0 says that rank 1 is lost, before rank 1 has returned. Rank 1 says why rank 0 believed that."""
    with Cluster(2, tmp_path) as cluster:
        (first, here), (second, there) = cluster.joined()
        gate = cluster.keep_away(second)
        cluster.end()
        cause = errors.Aborted("rank 1 has had enough", [1])
        telling = Waits(second.report, cause, world_id(0))
        reported = Waits(lambda: first.settle(world_id(0), errors.PeerLost("rank 1 is lost", [1]), 1))
        cluster.start()
        cluster.returned(1)
        time.sleep(judge.BELIEVED_AFTER_S + 0.1)
        assert not here.aborts
        gate.set()
        telling.ended()
        assert str(reported.ended().result) == "rank 1 has had enough"
        eventually(lambda: there.aborts)


def test_a_verdict_that_some_ranks_know_reaches_all(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        (first, _), (_, there) = cluster.joined()
        cluster.end()
        eventually(lambda: first._away)
        with first._news.lock:  # the verdict had been sent to rank 0 alone when the hub ended
            first._verdicts[world_id(0)] = errors.Aborted("of the former hub", [0])
        cluster.start()
        eventually(lambda: there.aborts)
        assert str(there.aborts[0]) == "of the former hub"


def test_a_scheduler_that_ends_during_the_set_up_of_an_epoch_makes_all_begin_the_next(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        members = [cluster.member(f"worker_{rank}") for rank in range(2)]
        for wait in [Waits(member.join, {"size": 2}, soon()) for member in members]:
            assert wait.ended().result.epoch == 0
        readying = Waits(members[0].ready, soon())
        cluster.end()
        cluster.start()
        assert "started again while the ranks set up epoch 0" in str(readying.ended().error)
        assert readying.error.kind == "PeerLost"
        assert cluster.rejoined(members) == [1, 1]
        cluster.set_up(members)


def test_a_recovery_file_of_an_earlier_epoch_makes_all_begin_the_next(tmp_path):
    """The disk was full when the epoch began."""
    with Cluster(2, tmp_path) as cluster:
        members = [member for member, _ in cluster.joined()]
        cluster.recovery.write = lambda membership: None
        assert cluster.rejoined(members) == [1, 1]
        (_, here), (_, there) = cluster.set_up(members)
        cluster.end()
        cluster.start()
        eventually(lambda: here.aborts and there.aborts)
        assert "did not know epoch 1" in str(here.aborts[0])
        assert cluster.rejoined(members) == [2, 2]


@pytest.mark.parametrize("order", ["earlier first", "later first"])
def test_an_abort_of_an_earlier_epoch_does_not_end_this_one(tmp_path, order):
    """The hub ended when it had welcomed only rank 0 to epoch 1. Rank 1 still waits after the abort of epoch 0."""
    with Cluster(2, tmp_path) as cluster:
        members = later, earlier = [member for member, _ in cluster.joined()]
        cluster.recovery.write = lambda membership: None
        assert cluster.rejoined(members) == [1, 1]
        (_, here), _ = cluster.set_up(members)
        gates = {member: cluster.keep_away(member) for member in members}
        cluster.end()
        eventually(lambda: earlier._away and later._away)
        earlier._welcome = earlier._welcome._replace(epoch=0)
        earlier._verdicts[""] = errors.Aborted("of epoch 0", [1])
        cluster.start()
        for count, member in enumerate((earlier, later) if order == "earlier first" else (later, earlier), 1):
            gates[member].set()
            cluster.returned(count)
        eventually(lambda: here.aborts)
        assert ["did not know epoch 1" in str(abort) for abort in here.aborts] == [True]
        waiting = [Waits(earlier.rejoin, {"size": 2}, soon())]
        eventually(lambda: any(link.waits for link in cluster.hub._roster))  # so the hub has heard of the abort
        assert cluster.hub._groups.aborted is None
        waiting.append(Waits(later.rejoin, {"size": 2}, soon()))
        assert [wait.ended().result.epoch for wait in waiting] == [2, 2]
        cluster.set_up(members)


@pytest.mark.parametrize("order", ["waits first", "founded first"])
def test_a_group_that_only_some_ranks_have_founded_fails_on_all(tmp_path, order):
    """The scheduler ends after rank 0 has learnt that all have met, and before rank 1 has learnt it."""
    with Cluster(2, tmp_path) as cluster:
        (first, here), (second, there) = cluster.joined()
        group = "0:pair:0123456789abcdef:1"
        founded = Communicator()
        with cluster.losing(second, "met"):
            late = Waits(cluster.found, second, Communicator(), group, [0, 1])
            cluster.found(first, founded, group, [0, 1])
            waits, has = (cluster.keep_away(member) for member in (second, first))
        cluster.start()
        for gate, count in zip((waits, has) if order == "waits first" else (has, waits), (1, 2), strict=True):
            gate.set()
            cluster.returned(count)
        assert "while the ranks created group pair" in str(late.ended().error)
        eventually(lambda: founded.aborts)
        assert not here.aborts and not there.aborts


def test_a_scheduler_that_ends_while_ranks_wait_for_the_next_epoch(tmp_path, impatient):
    with Cluster(3, tmp_path) as cluster:
        ranks = cluster.joined()
        ranks[2][0].close()
        eventually(lambda: ranks[0][1].aborts)
        waiting = [Waits(member.rejoin, {"size": 3}, soon()) for member, _ in ranks[:2]]
        eventually(lambda: sum(link.waits for link in cluster.hub._roster) == 2)
        cluster.end()
        cluster.start()
        new = Waits(cluster.member("worker_2").join, {"size": 3}, soon())
        assert [wait.ended().result.epoch for wait in (*waiting, new)] == [1, 1, 1]


def test_ranks_that_join_while_the_scheduler_ends_join_the_next_one(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        first = Waits(cluster.member("worker_0").join, {"size": 2}, soon())
        eventually(lambda: any("1 of 2" in line for line in cluster.log))
        cluster.end()
        cluster.start()
        second = Waits(cluster.member("worker_1").join, {"size": 2}, soon())
        assert [wait.ended().result.rank for wait in (first, second)] == [0, 1]


def test_a_bye_that_was_not_confirmed_is_said_again(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        ranks = cluster.joined()
        cluster.end()
        leaving = [Waits(member.leave, 5) for member, _ in ranks]
        eventually(lambda: all("bye" in member._unanswered for member, _ in ranks))
        cluster.start()
        for wait in leaving:
            assert wait.ended().error is None
        cluster.thread.join(60)
        assert cluster.outcome.ok, cluster.outcome


def test_a_rank_whose_confirmation_was_lost_has_left(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        (first, _), (second, _) = cluster.joined()
        with cluster.losing(second, "bye"):
            leaving = Waits(second.leave, 5)
        assert cluster.hub._roster.left == [1]
        cluster.start()
        assert leaving.ended().error is None and "bye" not in second._unanswered
        Waits(first.leave, 5).ended()
        cluster.thread.join(60)
        assert cluster.outcome.ok, cluster.outcome


# -- who may take a seat


def test_a_process_without_the_token_cannot_return_as_a_rank(tmp_path):
    with Cluster(2, tmp_path) as cluster, contextlib.ExitStack() as closing:
        ranks = cluster.joined()
        for secret in (b"", bytes(32), cluster.members[1]._token):
            stream = greeted(cluster.address, run=cluster.hub.run)
            frames = Frames(stream)
            closing.callback(frames.close)
            proof = security.proof(secret, stream.secret)
            frames.send({"t": "return", "rank": 0, "epoch": 0, "proof": proof, "facts": {}}, soon())
            answer = frames.receive(soon())
            assert answer["t"] == "refused" and "another process has taken the place of rank 0" in answer["why"]
        assert not any(communicator.aborts for _, communicator in ranks)


def test_nobody_can_return_as_a_process_that_was_not_welcomed(tmp_path):
    """Such a process has no nonce yet, so everybody who has the job key could make its proof."""
    with Cluster(2, tmp_path) as cluster, contextlib.ExitStack() as closing:
        Waits(cluster.member("worker_0").join, {"size": 2}, soon())
        eventually(lambda: any("1 of 2" in line for line in cluster.log))
        for rank in (-1, 0):
            stream = greeted(cluster.address)
            frames = Frames(stream)
            closing.callback(frames.close)
            proof = security.proof(security.token(KEY, cluster.hub.run, b""), stream.secret)
            frames.send({"t": "return", "rank": rank, "epoch": 0, "proof": proof, "facts": {}}, soon())
            assert frames.receive(soon())["t"] == "refused"
        assert not any("is back" in line for line in cluster.log)


def test_a_proof_is_worth_nothing_over_another_link(tmp_path):
    with Cluster(2, tmp_path) as cluster, contextlib.ExitStack() as closing:
        cluster.joined()
        one, other = (greeted(cluster.address, run=cluster.hub.run) for _ in range(2))
        proof = security.proof(cluster.members[0]._token, one.secret)
        closing.callback(one.close)
        frames = Frames(other)
        closing.callback(frames.close)
        frames.send({"t": "return", "rank": 0, "epoch": 0, "proof": proof, "facts": {}}, soon())
        assert frames.receive(soon())["t"] == "refused"


def test_a_rank_returns_although_the_hub_has_not_noticed_the_end_of_its_link(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        (first, here), (second, there) = cluster.joined()
        # Keep a second descriptor of the socket open, so that the hub does not see its end.
        held = first._stream.sock.dup()
        first._stream.sock.shutdown(socket.SHUT_RD)
        cluster.returned(1)
        held.close()
        meetings = [Waits(member.meet, "k", "a meeting", [0, 1], {}, soon()) for member in (first, second)]
        assert [wait.ended().result.ranks for wait in meetings] == [[0, 1]] * 2
        assert not here.aborts and not there.aborts


def test_a_second_process_with_the_id_of_a_returning_rank_is_refused(tmp_path, patient):
    with Cluster(2, tmp_path) as cluster:
        (first, _), _ = cluster.joined()
        gate = cluster.keep_away(first)
        cluster.end()
        cluster.start()
        second = Waits(cluster.member("worker_0").join, {"size": 2}, soon())
        eventually(lambda: cluster.hub._returning._claims)
        gate.set()
        assert "rank 0 is taken already" in str(second.ended().error)
        cluster.returned(2)


def test_a_process_that_is_back_after_its_seat_was_taken_ends(tmp_path, impatient):
    with Cluster(2, tmp_path) as cluster:
        (first, here), (second, _) = cluster.joined()
        gate = cluster.keep_away(first)
        cluster.end()
        cluster.start()
        new = Waits(cluster.member("worker_0").join, {"size": 2}, soon())
        rejoining = Waits(second.rejoin, {"size": 2}, soon())
        assert [wait.ended().result.epoch for wait in (new, rejoining)] == [1, 1]
        gate.set()
        eventually(lambda: here.aborts)
        assert "another process has taken the place of rank 0" in str(here.aborts[0])


def test_a_rank_that_was_given_up_is_taken_back_for_the_next_epoch(tmp_path):
    """Its network was away for too long. When it is back, it learns of the failure, and rejoins in the same process."""
    with Cluster(2, tmp_path) as cluster:
        (first, here), (second, there) = cluster.joined()
        gate = cluster.keep_away(first)
        first._stream.sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: there.aborts)
        assert there.aborts[0].ranks == (0,)
        rejoining = Waits(second.rejoin, {"size": 2}, soon())
        gate.set()
        eventually(lambda: here.aborts)
        assert here.aborts[0].ranks == (0,)
        waiting = Waits(first.rejoin, {"size": 2}, soon())
        assert [wait.ended().result.epoch for wait in (rejoining, waiting)] == [1, 1]


def test_a_rank_that_does_not_return_is_given_up_after_the_node_timeout(tmp_path, monkeypatch, impatient):
    monkeypatch.setenv("MS_NODE_TIMEOUT", "0.5")
    with Cluster(2, tmp_path) as cluster:
        (first, _), (_, there) = cluster.joined()
        cluster.end()
        first.close()
        cluster.start()
        cluster.returned(1)
        eventually(lambda: there.aborts)
        assert there.aborts[0].ranks == (0,)


def test_nobody_is_given_up_before_anybody_could_reach_the_scheduler(tmp_path, monkeypatch, impatient):
    monkeypatch.setenv("MS_NODE_TIMEOUT", "0.5")
    with Cluster(2, tmp_path) as cluster:
        (first, here), (second, there) = cluster.joined()
        gates = [cluster.keep_away(member) for member in (first, second)]
        cluster.end()
        cluster.start()
        time.sleep(1)
        monkeypatch.setenv("MS_NODE_TIMEOUT", "60")  # the second rank may return much later than the first
        for gate in gates:
            gate.set()
        cluster.returned(2)
        assert not here.aborts and not there.aborts


def test_the_file_of_a_job_to_which_nobody_returned_stays(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        ranks = cluster.joined()
        cluster.end()
        for member, _ in ranks:
            member.close()
        cluster.topo_timeout_s = 0.3
        cluster.start()
        cluster.thread.join(60)
        assert "only 0 of 2 workers joined" in cluster.outcome.text and not cluster.hub.is_over


def test_a_rank_that_closes_while_it_dials_does_not_return(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        (first, _), _ = cluster.joined()
        gate = cluster.keep_away(first)
        cluster.end()
        eventually(lambda: first._away)
        closing = Waits(first.close)
        eventually(first._closing.is_set)
        cluster.start()
        gate.set()
        closing.ended()
        first._reader.join(60)
        cluster.returned(1)
        time.sleep(0.3)
        assert sum("is back" in line for line in cluster.log) == 1


def test_a_job_whose_processes_were_all_killed_starts_with_the_same_ranks(tmp_path, impatient):
    with Cluster(2, tmp_path) as cluster:
        for member, _ in cluster.joined():
            member.close()
        cluster.end()
        cluster.start()
        new = [Waits(cluster.member(f"worker_{rank}").join, {"size": 2}, soon()) for rank in (1, 0)]
        assert [(wait.ended().result.rank, wait.result.epoch) for wait in new] == [(1, 1), (0, 1)]


def test_a_worker_that_is_lost_again_and_again_ends_the_job(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        (_, here), (second, _) = cluster.joined()
        second.close()
        for _ in range(9):
            eventually(lambda: not cluster.hub._roster.at(1).open)  # otherwise its id would be taken
            assert cluster.hub.state.over is None
            new = cluster.member("worker_1")
            cluster.log.clear()
            joining = Waits(new.join, {"size": 2}, soon())
            eventually(lambda: any("joined" in line for line in cluster.log))
            new.close()
            joining.ended()
        eventually(lambda: cluster.hub.state.over)
        assert "10 times in a row within 10 s of joining" in str(cluster.hub.state.over)
        assert here.aborts


def test_a_scheduler_that_ends_when_all_have_left_ends_at_once_when_it_is_started_again(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        ranks = cluster.joined()
        for wait in [Waits(member.leave, 5) for member, _ in ranks]:
            wait.ended()
        cluster.end()  # killed before it removed the file
        cluster.start()
        cluster.thread.join(60)
        assert cluster.outcome.ok, cluster.outcome


def test_a_second_newcomer_for_one_seat_is_refused_and_a_dead_one_is_not_seated(tmp_path, patient, monkeypatch):
    with Cluster(2, tmp_path) as cluster:
        (first, _), (second, there) = cluster.joined()
        cluster.end()
        first.close()
        cluster.start()
        dead = cluster.member("worker_0")
        Waits(dead.join, {"size": 2}, soon())
        eventually(lambda: cluster.hub._returning._claims)
        dead.close()
        eventually(lambda: not cluster.hub._returning._claims[0][0].open)
        new = Waits(cluster.member("worker_0").join, {"size": 2}, soon())
        eventually(lambda: cluster.hub._returning._claims[0][0].open)
        other = Waits(cluster.member("worker_0").join, {"size": 2}, soon())
        assert "is taken already, by a process that waits to join" in str(other.ended().error)
        monkeypatch.setattr(returning, "RETURN_S", 0.0)
        greeted(cluster.address).close()  # makes the hub look at the time again
        eventually(lambda: there.aborts)
        rejoining = Waits(second.rejoin, {"size": 2}, soon())
        assert [wait.ended().result.epoch for wait in (new, rejoining)] == [1, 1]


def test_a_worker_without_an_id_is_told_to_have_one(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        members = cluster.joined()
        cluster.end()
        for member, _ in members:  # otherwise they may take their seats first, and the job is full
            member.close()
        cluster.start()
        new = Waits(cluster.member(None).join, {"size": 2}, soon())
        assert "give this worker the MS_NODE_ID that it had before" in str(new.ended().error)


def test_a_worker_does_not_wait_for_a_scheduler_without_recovery(tmp_path):
    with Job(1, ranks_known=False, tcp=True) as job:
        stream = greeted(job.listener.getsockname())
        dial_again = pytest.fail  # is never called
        member = Member(Frames(stream), key=ADMISSION[CONTROL], node_id="w", dial_again=dial_again)
        job.members.append(member)
        member.join({"size": 1}, soon())
        job.hub.stop()
        eventually(lambda: member._failure)
        assert "the scheduler is gone" in str(member._failure)


def test_stopped_before_the_workers_are_back_is_no_success(tmp_path):
    with Cluster(2, tmp_path) as cluster:
        for member, _ in cluster.joined():
            member.close()
        cluster.end()
        cluster.start()
        cluster.end()
        assert not cluster.outcome.ok and "stopped before these had returned: rank 0" in cluster.outcome.text


# -- real processes

LOOP = """
import os, sys, time
import numpy as np
import mscomm
mscomm.init()
pair = mscomm.create_group("pair", [0, 1])
step, agreed, x = 0, False, np.ones(1000, np.float32)
while True:
    try:
        if not agreed:
            step, agreed = int(mscomm.all_reduce(np.array([step]), "max")[0]), True
        while step % 5 or not mscomm.all_reduce(np.array([int(os.path.exists(sys.argv[1]))]), "max")[0]:
            assert mscomm.all_reduce(x)[0] == mscomm.get_group_size()
            assert not pair or mscomm.all_reduce(x, group=pair)[0] == 2
            step += 1
            if step % 5 == 0:
                print(step, flush=True)
            time.sleep(0.01)
        mscomm.barrier()
        break
    except mscomm.PeerLost as lost:
        print("lost", *lost.ranks, flush=True)
        mscomm.rejoin()
        agreed = False
print("done", mscomm.get_rank(), flush=True)
mscomm.release()
"""


class Processes:
    """A scheduler and workers, which the test starts, kills, and starts again by the same command."""

    def __init__(self, folder, port, workers):
        self.folder, self.path, self.stop = folder, folder / "recovery", folder / "stop"
        (folder / "loop.py").write_text(LOOP)
        job = {"MS_WORKER_NUM": str(workers), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
        job |= {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(self.path)}
        self.env = {**clean_environment(), **job, "TMPDIR": str(folder)}
        self.logs: dict[str, str] = {}
        self.running: dict[str, subprocess.Popen] = {}
        for name in ("sched", *(f"worker_{rank}" for rank in range(workers))):
            self.start(name)

    def start(self, name):
        role = {"MS_ROLE": "MS_SCHED" if name == "sched" else "MS_WORKER", "MS_NODE_ID": name}
        with open(self.folder / f"{name}.log", "a") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, self.folder / "loop.py", self.stop], env={**self.env, **role}, stdout=log, stderr=log
            )

    def kill(self, name, by=signal.SIGKILL):
        self.running[name].send_signal(by)
        self.running[name].wait(60)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def steps(self, name):
        return sum(line.isdigit() for line in self.log(name).splitlines())

    def go_on(self):
        """Wait until every worker has made some more steps."""
        workers = [name for name in self.running if name != "sched"]
        before = {name: self.steps(name) for name in workers}
        eventually(lambda: all(self.steps(name) > before[name] + 1 for name in workers))

    def finish(self):
        self.stop.touch()
        codes = {name: process.wait(60) for name, process in self.running.items()}
        logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in self.running)
        assert set(codes.values()) == {0}, (codes, logs)
        assert "the job ended well" in self.log("sched")
        assert os.listdir(self.path) == [] and not list(self.folder.glob("mscomm-*/*.key"))

    def end(self):
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path, port):
    made = Processes(tmp_path, port, 3)
    yield made
    made.end()


def test_a_killed_scheduler_a_killed_worker_and_both(processes):
    processes.go_on()
    survivor = processes.running["worker_0"].pid
    processes.kill("sched")
    processes.go_on()
    processes.start("sched")
    eventually(lambda: processes.log("sched").count("is back") == 3)
    processes.go_on()
    assert not any("lost" in processes.log(f"worker_{rank}") for rank in range(3))
    processes.kill("worker_1")
    processes.start("worker_1")
    processes.go_on()
    processes.kill("sched")
    processes.kill("worker_2")
    processes.start("sched")
    processes.start("worker_2")
    processes.go_on()
    assert processes.running["worker_0"].pid == survivor
    processes.finish()
    assert processes.log("worker_0").count("lost 1\n") == processes.log("worker_0").count("lost 2\n") == 1


def test_all_processes_are_killed_and_started_again(processes):
    processes.go_on()
    for name in processes.running:
        processes.kill(name)
    for name in processes.running:
        processes.start(name)
    processes.go_on()
    processes.finish()
    assert all(f"done {rank}" in processes.log(f"worker_{rank}") for rank in range(3))


def test_a_scheduler_goes_on_after_sigterm_and_one_of_another_job_changes_nothing(processes):
    processes.go_on()
    processes.kill("sched", signal.SIGTERM)
    processes.go_on()
    processes.env["MS_WORKER_NUM"] = "5"
    processes.start("sched")
    assert processes.running["sched"].wait(60) == 1
    assert "it belongs to another job (port" in processes.log("sched")
    processes.env["MS_WORKER_NUM"] = "3"
    processes.start("sched")
    eventually(lambda: processes.log("sched").count("is back") == 3)
    processes.go_on()
    processes.finish()
