"""The hello: which connections are accepted, which are refused, and what the other side is told."""

from __future__ import annotations

import struct

import pytest
from control import JOB, KEY, VERSION

from mscomm import errors
from mscomm.cluster import links
from mscomm.cluster.hello import CONTROL, DATA, Hello, Identity, named


def converse(connector: Hello, acceptor: Hello) -> None:
    """Pass the bytes that each end sends to the other end, until both ends are done."""
    to_acceptor = connector.feed(b"")
    while not (connector.done and acceptor.done):
        to_connector = acceptor.feed(to_acceptor)
        to_acceptor = connector.feed(to_connector)


def ends(mine=None, peer=None, ranks=(3,), keys=(KEY, KEY), purposes=(DATA, DATA)):
    mine = mine or Identity(JOB, VERSION, 3, 1)
    peer = peer or Identity(JOB, VERSION, 0, 1)
    return Hello.connector(keys[0], purposes[0], mine), Hello.acceptor(keys[1], purposes[1:], peer, ranks)


def test_hello_tells_the_acceptor_who_came():
    connector, acceptor = ends()
    converse(connector, acceptor)
    assert acceptor.peer == Identity(JOB, VERSION, 3, 1)
    assert acceptor.refusal is None


def test_hello_works_one_byte_at_a_time_and_has_the_documented_sizes():
    connector, acceptor = ends()
    turns, sent, sizes = [(acceptor, connector), (connector, acceptor)], connector.feed(b""), []
    while sent:
        sizes.append(len(sent))
        (receiver, _), *_ = turns
        answers = [receiver.feed(sent[i : i + 1]) for i in range(len(sent))]
        sent = b"".join(answers)
        turns.reverse()
    assert sizes == [40, 72, 80, 40]
    assert connector.done
    assert acceptor.done


def test_connector_does_not_prove_itself_to_an_acceptor_with_another_key():
    connector, acceptor = ends(keys=(KEY, b"x" * 32))
    with pytest.raises(errors.AuthenticationError, match="does not have the key"):
        connector.feed(acceptor.feed(connector.feed(b"")))


def test_acceptor_says_nothing_to_a_wrong_proof():
    connector, acceptor = ends()
    proof = connector.feed(acceptor.feed(connector.feed(b"")))
    with pytest.raises(errors.AuthenticationError, match="could not prove"):
        acceptor.feed(proof[:-1] + bytes([proof[-1] ^ 1]))


def test_a_changed_verdict_is_noticed():
    connector, acceptor = ends()
    verdict = acceptor.feed(connector.feed(acceptor.feed(connector.feed(b""))))
    with pytest.raises(errors.AuthenticationError, match="forged"):
        connector.feed(b"\1" + verdict[1:])


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (Identity(b"k" * 16, VERSION, 3, 1), "another job"),
        (Identity(JOB, "9.9", 3, 1), "another version of mscomm than 9.9"),
        (Identity(JOB, VERSION, 2, 1), "rank 2 is not expected"),
        (Identity(JOB, VERSION, -1, 1), "rank -1 is not expected"),
        (Identity(JOB, VERSION, 3, 0), "epoch 0 is not the current one"),
        (Identity(bytes(16), VERSION, -1, 0), "another job"),
    ],
)
def test_refusals_are_told_to_a_peer_with_the_key(mine, text):
    connector, acceptor = ends(mine=mine)
    with pytest.raises(errors.Error, match=text):
        converse(connector, acceptor)
    assert text in str(acceptor.refusal)
    assert acceptor.done


def test_a_control_link_may_know_nothing_yet():
    nobody = Identity(version=VERSION)
    connector, acceptor = ends(nobody, nobody, purposes=(CONTROL, CONTROL))
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
