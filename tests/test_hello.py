"""The hello: which connections are accepted, which are refused, and what the other side is told."""

from __future__ import annotations

import struct

import pytest
from control import KEY, RUN, VERSION

from mscomm import errors
from mscomm.cluster import links, security
from mscomm.cluster.hello import CONTROL, DATA, LAUNCHER, Busy, Hello, Identity, grouped, named


def converse(connector: Hello, acceptor: Hello) -> None:
    """Pass the bytes that each end sends to the other end, until both ends are done."""
    to_acceptor = connector.feed(b"")
    while not (connector.done and acceptor.done):
        to_connector = acceptor.feed(to_acceptor)
        to_acceptor = connector.feed(to_connector)


GROUP = grouped("0:world")
THEIRS = Identity(version=VERSION, rank=3, epoch=1, run=RUN, to=0, group=GROUP)
OURS = Identity(version=VERSION, rank=0, epoch=1, run=RUN, group=GROUP)
HUB = Identity(version=VERSION, run=RUN)


def ends(theirs=THEIRS, ours=OURS, ranks=(3,), keys=(KEY, KEY), purposes=(DATA, DATA)):
    return Hello.connector(keys[0], purposes[0], theirs), Hello.acceptor({purposes[1]: keys[1]}, ours, ranks)


def test_hello_tells_the_acceptor_who_came_and_gives_both_a_secret_of_their_own():
    secrets = set()
    for _ in range(2):
        connector, acceptor = ends()
        converse(connector, acceptor)
        assert acceptor.peer == THEIRS
        assert acceptor.refusal is None
        assert connector.secret == acceptor.secret
        assert connector.peer.run == RUN
        secrets.add(connector.secret)
    assert len(secrets) == 2 and all(len(secret) == 32 for secret in secrets)


def test_hello_works_one_byte_at_a_time_and_has_the_documented_sizes():
    connector, acceptor = ends()
    turns, sent, sizes = [(acceptor, connector), (connector, acceptor)], connector.feed(b""), []
    while sent:
        sizes.append(len(sent))
        (receiver, _), *_ = turns
        answers = [receiver.feed(sent[i : i + 1]) for i in range(len(sent))]
        sent = b"".join(answers)
        turns.reverse()
    assert sizes == [40, 72, 112, 40]
    assert connector.done
    assert acceptor.done


def test_another_key_is_refused_before_the_acceptor_has_proved_anything():
    connector, acceptor = ends(keys=(KEY, b"x" * 32))
    answer = acceptor.feed(connector.feed(acceptor.feed(connector.feed(b""))))
    assert isinstance(acceptor.refusal, errors.AuthenticationError)
    assert answer[8:] == bytes(32)
    with pytest.raises(errors.AuthenticationError, match="does not have the key"):
        connector.feed(answer)


@pytest.mark.parametrize("place", range(112))
def test_a_changed_proof_is_refused(place):
    connector, acceptor = ends()
    proof = bytearray(connector.feed(acceptor.feed(connector.feed(b""))))
    proof[place] ^= 1
    acceptor.feed(bytes(proof))
    assert "could not prove" in str(acceptor.refusal)
    assert acceptor.secret == b""


@pytest.mark.parametrize("place", range(8, 56))
def test_a_changed_nonce_or_run_is_refused(place):
    connector, acceptor = ends()
    answer = bytearray(acceptor.feed(connector.feed(b"")))
    answer[place] ^= 1
    acceptor.feed(connector.feed(bytes(answer)))
    assert "could not prove" in str(acceptor.refusal)


@pytest.mark.parametrize("place", [0, *range(8, 40)])
def test_a_changed_verdict_is_noticed(place):
    connector, acceptor = ends()
    verdict = bytearray(acceptor.feed(connector.feed(acceptor.feed(connector.feed(b"")))))
    verdict[place] ^= 1
    with pytest.raises(errors.AuthenticationError, match="does not have the key"):
        connector.feed(bytes(verdict))


def test_replayed_messages_are_refused():
    connector, acceptor = ends()
    first = connector.feed(b"")
    third = connector.feed(acceptor.feed(first))
    acceptor.feed(third)
    assert acceptor.refusal is None
    _, again = ends()
    again.feed(first)
    again.feed(third)
    assert isinstance(again.refusal, errors.AuthenticationError)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"job": b"k" * 16}, "another job"),
        ({"version": "9.9"}, "another version of mscomm than 9.9"),
        ({"rank": 2}, "rank 2 is not expected"),
        ({"rank": -1}, "rank -1 is not expected"),
        ({"epoch": 0}, "epoch 0 is not the current one"),
        ({"run": b"k" * 16}, "belongs to another start of the job"),
        ({"run": bytes(16)}, "belongs to another start of the job"),
        ({"to": 1}, "the link is for rank 1 of another group"),
        ({"group": grouped("0:other")}, "the link is for rank 0 of another group"),
    ],
)
def test_refusals_are_told_to_a_peer_with_the_key(change, text):
    connector, acceptor = ends(THEIRS._replace(**change))
    with pytest.raises(errors.Error, match=text):
        converse(connector, acceptor)
    assert text in str(acceptor.refusal)
    assert acceptor.done


@pytest.mark.parametrize("messages", range(3))
def test_a_connector_that_is_put_off_may_try_again_at_any_time(messages):
    connector, acceptor = ends()
    to_acceptor = connector.feed(b"")
    for _ in range(messages):
        to_connector = acceptor.feed(to_acceptor)
        to_acceptor = connector.feed(to_connector) if to_connector else b""
        if acceptor.done:
            return
    with pytest.raises(Busy):
        connector.feed(acceptor.put_off())


@pytest.mark.parametrize(("run", "welcome"), [(RUN, True), (bytes(16), True), (b"k" * 16, False)])
def test_a_straggler_of_an_earlier_start_takes_no_seat(run, welcome):
    connector, acceptor = ends(HUB._replace(run=run, rank=3), HUB, purposes=(CONTROL, CONTROL))
    if welcome:
        converse(connector, acceptor)
        return
    with pytest.raises(errors.Error, match="belongs to another start of the job"):
        converse(connector, acceptor)


def test_a_worker_cannot_speak_as_launcher():
    keys = {purpose: security.admission_key(KEY, purpose) for purpose in (CONTROL, LAUNCHER)}
    connector = Hello.connector(keys[CONTROL], LAUNCHER, HUB)
    acceptor = Hello.acceptor(keys, HUB, range(4))
    with pytest.raises(errors.AuthenticationError):
        converse(connector, acceptor)
    assert isinstance(acceptor.refusal, errors.AuthenticationError)


def test_a_control_link_may_know_nothing_yet():
    nobody = Identity(version=VERSION)
    connector, acceptor = ends(nobody, HUB, purposes=(CONTROL, CONTROL))
    converse(connector, acceptor)
    assert acceptor.peer.rank == -1
    assert acceptor.refusal is None


@pytest.mark.parametrize(("mine", "hub"), [("B", "A"), ("", "A"), ("B", "")])
def test_a_control_link_names_the_job_where_an_id_is_set(mine, hub):
    connector, acceptor = ends(*(Identity(named(text), VERSION) for text in (mine, hub)), purposes=(CONTROL, CONTROL))
    with pytest.raises(errors.Error, match=r"it serves another job\. MSCOMM_JOB_ID must have the same text"):
        converse(connector, acceptor)
    connector, acceptor = ends(*(Identity(named(hub), VERSION) for _ in range(2)), purposes=(CONTROL, CONTROL))
    converse(connector, acceptor)
    assert acceptor.refusal is None


def test_another_wire_version_is_named_on_both_ends():
    connector, acceptor = ends()
    first = connector.feed(b"")
    answer = acceptor.feed(first[:4] + struct.pack("<H", 7) + first[6:])
    assert "wire version 7" in str(acceptor.refusal)
    assert len(answer) == 72
    with pytest.raises(errors.Error, match="install the same mscomm everywhere"):
        connector.feed(answer)


def test_garbage_is_refused_at_its_first_bytes():
    _, acceptor = ends()
    with pytest.raises(links.NotMscomm, match="GET"):
        acceptor.feed(b"GET / HTTP/1.1\r\n")


def test_a_link_of_another_purpose_is_not_let_in():
    connector, acceptor = ends(purposes=(DATA, CONTROL))
    with pytest.raises(errors.Error, match="purpose 3"):
        acceptor.feed(connector.feed(b""))
