"""Which algorithm is chosen, depending on the ranks, the hosts and the size of the message."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import ranks

import mscomm
from mscomm import _core
from mscomm.cluster import assemble, prices
from mscomm.cluster.prices import Prices
from mscomm.job import resolve

NONE = [""] * len(_core.collectives)


def chosen(what: str, hosts: list[int], forced: list[str] = NONE) -> list[str]:
    return _core.Layout(hosts=hosts, rank=0, forced=forced).rows(list(_core.collectives).index(what))


def test_the_carrier_follows_from_the_hosts():
    assert chosen("all_reduce", [0, 0, 0]) == ["arena"]
    assert chosen("all_reduce", [0, 0, 1, 1]) == chosen("all_reduce", [0, 1, 1]) == chosen("all_reduce", [0, 1, 0])
    assert chosen("all_reduce", [0, 1, 0]) == ["hierarchical"]
    assert chosen("all_reduce", [0, 1, 2]) == ["direct", "doubling", "halving", "bruck"]
    assert chosen("all_gather", [0, 0, 1]) == ["hierarchical"]
    assert chosen("all_to_all", [0, 0, 1]) == ["hierarchical"]
    assert chosen("gather", [0, 0, 1]) == chosen("scatter", [0, 0, 1]) == ["hierarchical", "direct"]
    assert chosen("scan", [0, 0, 1]) == ["chain"]


@pytest.mark.parametrize(
    ("hosts", "rank", "forced", "at_home", "arena", "mesh"),
    [
        ([0], 0, "", [0], False, False),
        ([0, 0, 0], 1, "", [0, 1, 2], True, False),
        ([0, 0], 1, "direct", [0, 1], False, True),
        ([0, 0], 1, "hierarchical", [0, 1], True, True),
        ([0, 1, 0], 2, "", [0, 2], True, True),
        ([0, 1, 0], 2, "direct", [0, 2], True, True),  # for the other collectives
        ([0, 1, 0], 1, "", [1], False, True),
        ([0, 1, 2], 2, "", [2], False, True),
    ],
)
def test_the_layout_says_what_a_rank_sets_up(hosts, rank, forced, at_home, arena, mesh):
    algorithms = [forced if what == "all_reduce" else "" for what in _core.collectives]
    layout = _core.Layout(hosts=hosts, rank=rank, forced=algorithms)
    assert (layout.rank, layout.at_home, layout.arena, layout.mesh) == (rank, at_home, arena, mesh)


def test_the_arena_cannot_be_forced_on_several_hosts():
    forced = ["arena" if what == "all_reduce" else "" for what in _core.collectives]
    with pytest.raises(ValueError, match="MSCOMM_ALGO: arena needs all ranks on one host"):
        _core.Layout(hosts=[0, 1], rank=0, forced=forced)


def test_what_is_forced_is_not_asked_about_its_size():
    forced = ["tree" if what == "broadcast" else "" for what in _core.collectives]
    assert chosen("broadcast", [0, 1, 2]) == ["tree", "ring"]
    assert chosen("broadcast", [0, 1, 2], forced) == ["tree"]


def sizes_chosen(what: str, ranks: int, sizes: Iterable[int]) -> list[str]:
    """Return the algorithm for each size, if each rank is on a host of its own."""
    layout = _core.Layout(hosts=list(range(ranks)), rank=0, forced=NONE)
    return [layout.chosen(list(_core.collectives).index(what), size) for size in sizes]


def test_a_long_gather_or_scatter_over_hosts_uses_shared_memory():
    layout = _core.Layout(hosts=[0, 0, 1, 1], rank=0, forced=NONE)
    for what, sizes in {"gather": ((128 << 10) - 1, 128 << 10), "scatter": ((512 << 10) - 1, 512 << 10)}.items():
        found = [layout.chosen(list(_core.collectives).index(what), size) for size in sizes]
        assert found == ["direct", "hierarchical"], what


LONG = (8, 128 << 10, 256 << 10, (1 << 20) + 1)


def test_a_long_broadcast_over_links_goes_along_a_chain():
    """Check that the faster algorithm is chosen. A chain (the algorithm `ring`) takes as long as one message, n-2
    windows of 128 KiB and n-1 latencies. A tree takes as long as log2(n) messages, log2(n)-1 windows and log2(n)
    latencies.
    """
    assert sizes_chosen("broadcast", 2, LONG) == ["tree"] * 4
    assert sizes_chosen("broadcast", 4, LONG) == ["tree", "tree", "ring", "ring"]


@ranks(4, env={"MSCOMM_HOST_ID": "{rank}"})
def test_ranks_on_hosts_of_their_own_take_the_chosen_algorithm(rank: int, group: Any):
    layout, broadcast = resolve(None).core.layout, list(_core.collectives).index("broadcast")
    assert [layout.chosen(broadcast, size) for size in LONG] == sizes_chosen("broadcast", 4, LONG)
    for size in LONG:
        for root in range(4):
            x = np.full(size, rank if rank == root else 99, np.uint8)
            assert (mscomm.broadcast(x, root=root) == root).all(), size


def test_many_hosts_choose_what_takes_few_messages_or_a_ring():
    """With many hosts, `direct` is slower for short messages than `bruck` and `doubling`, because each rank sends n-1
    messages instead of log2(n). Long messages of all_gather go around a ring. Reductions do not use a ring, because the
    bits of their results would change. For them, `halving` has few messages and few bytes.
    """
    sizes = (8, 1 << 10, 8 << 10, 1 << 20, 34 << 20)
    assert sizes_chosen("all_reduce", 64, sizes) == ["doubling", "doubling", "doubling", "halving", "direct"]
    assert sizes_chosen("all_gather", 64, sizes) == ["bruck", "bruck", "bruck", "ring", "ring"]
    assert sizes_chosen("reduce_scatter", 64, sizes) == ["halving", "halving", "halving", "halving", "direct"]
    assert sizes_chosen("all_gather", 8, sizes) == ["direct", "direct", "direct", "ring", "ring"]


def test_the_choice_follows_the_prices():
    """Check that a call takes few steps if latencies cost much, and few messages if messages cost much."""
    hosts, all_gather = list(range(8)), list(_core.collectives).index("all_gather")

    def by(bytes: int = 1 << 10, **changed: float) -> str:
        prices = Prices(*_core.Layout(hosts=hosts, rank=0, forced=NONE).prices)._replace(**changed)
        return _core.Layout(hosts=hosts, rank=0, forced=NONE, prices=prices).chosen(all_gather, bytes)

    assert by() == by(latency_us=100.0) == "direct"
    assert by(message_us=50.0) == "bruck"
    free = {"message_us": 50.0, "crowded_byte_ns": 0.0, "copied_byte_ns": 0.0}
    assert by(2 << 20, **free) == "bruck"
    assert by((2 << 20) + 1, **free) == "direct"  # bruck would need more than 16 MiB of scratch memory
    assert by(crowded_byte_ns=1000.0, copied_byte_ns=1000.0) == "ring"
    with pytest.raises(ValueError, match="a price is not a number of 0 or more"):
        by(latency_us=-1.0)


MEASURED = Prices(latency_us=1.0, message_us=50.0, byte_ns=1.0, crowded_byte_ns=0.0, copied_byte_ns=0.1)


@ranks(4, env={"MSCOMM_HOST_ID": "{rank}"}, init=None)
def test_all_ranks_choose_by_the_file_of_rank_0(rank: int):
    """Rank 1 has another file, rank 2 has none, and rank 3 cannot read its file."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"prices": MEASURED._replace(message_us=50.0 - 49.0 * rank)._asdict()}, file, allow_nan=False)
        file.flush()
        os.environ["MSCOMM_TUNED"] = [file.name, file.name, "", "/no/such/file"][rank]
        mscomm.init()
    layout = resolve(None).core.layout
    assert Prices(*layout.prices) == MEASURED
    assert layout.chosen(list(_core.collectives).index("all_gather"), 8) == "bruck"
    assert mscomm.all_gather(np.array([rank])).tolist() == [0, 1, 2, 3]
    assert layout_of_pair(rank) == MEASURED


def layout_of_pair(rank: int) -> Prices:
    group = mscomm.create_group("pair", [rank // 2 * 2, rank // 2 * 2 + 1])
    return Prices(*resolve(group).core.layout.prices)


@ranks(2, env={"MSCOMM_TUNED": "/no/such/file"}, init=None)
def test_a_file_that_rank_0_cannot_read_is_an_error_on_every_rank(rank: int):
    with pytest.raises(ValueError, match=r"^rank 0: MSCOMM_TUNED='/no/such/file': No such file or directory$"):
        mscomm.init()


def test_a_job_of_one_rank_refuses_a_file_that_it_cannot_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MSCOMM_TUNED", "/no/such/file")
    with pytest.raises(ValueError, match="MSCOMM_TUNED='/no/such/file': No such file or directory"):
        assemble.alone(assemble.Asked("cpu", None, "", prices.read(os.environ)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no prices in it; `mscomm bench tune --json FILE` writes"),
        ("[1]", "there are no prices in it"),
        ('{"rows": []}', "there are no prices in it"),
        ('{"prices": {"latency_us": 1}}', "there are no prices in it"),
        (json.dumps({"prices": MEASURED._asdict() | {"byte_ns": 10**400}}), "there are no prices in it"),
        (json.dumps({"prices": MEASURED._asdict() | {"byte_ns": -1}}), "a price is not a number of 0 or more"),
        (json.dumps({"prices": MEASURED._asdict() | {"byte_ns": math.inf}}), "a price is not a number of 0 or more"),
        ("[" * 100_000, "there are no prices in it"),
    ],
)
def test_a_file_without_prices_is_refused(text: str, said: str, tmp_path: Path):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    assert said in str(prices.read({"MSCOMM_TUNED": str(path)}))


def test_prices_without_effect_are_known():
    measured, others = list(MEASURED), [1.0] * 5
    facts = [{"prices": measured}, {"prices": None}, {"prices": "cannot be read"}, {"prices": others}, {}]
    assert prices.agreed(facts) == measured and prices.without_effect(facts) == [3]
    assert prices.agreed([{"prices": None}, *facts]) is None
    assert prices.without_effect([{"prices": None}, *facts]) == [1, 3, 4]


def test_a_rank_0_that_comes_back_without_its_file_does_not_end_the_job():
    facts = [{"prices": "MSCOMM_TUNED='x': No such file or directory"}, {"prices": list(MEASURED)}]
    with pytest.raises(ValueError, match=r"^rank 0: MSCOMM_TUNED"):
        prices.agreed(facts)
    assert prices.agreed(facts, epoch=1) is None


@pytest.mark.long
@ranks(34, env={"MSCOMM_HOST_ID": "{rank}"})
def test_many_hosts_make_calls(rank: int, group: Any):
    x = np.arange(5.0) + rank
    assert (mscomm.all_reduce(x) == 34 * np.arange(5.0) + 33 * 17).all()
    assert (mscomm.all_gather(x[None]) == np.arange(34)[:, None] + np.arange(5.0)).all()
    rows, counts = mscomm.all_gather_v(np.full(rank % 3, rank))
    assert counts == [rank % 3 for rank in range(34)]
    assert (rows == np.repeat(np.arange(34), counts)).all()


@pytest.mark.parametrize("algorithm", ["direct", ""])
@ranks(2, env={"MSCOMM_ALGO": "{algorithm}"})
def test_a_rank_that_only_receives_may_send_an_empty_part_of_out(rank: int, group: Any, algorithm: str):
    """Rank 1's x is an empty part of out. Writing to out cannot overwrite x, so mscomm must allow the overlap."""
    out = np.zeros(1_000_000, np.int32)
    x, counts = (np.arange(1_000_000, dtype=np.int32), [0, 1_000_000]) if rank == 0 else (out[:0], [0, 0])
    rows, received = mscomm.all_to_all_v(x, counts, out=out if rank == 1 else None)
    assert received == ([0, 0] if rank == 0 else [1_000_000, 0])
    assert len(rows) == sum(received) and (rows == np.arange(len(rows))).all()
    assert mscomm.all_gather(np.array([rank])).tolist() == [0, 1]
