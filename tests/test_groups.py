"""Groups: how they are created, named, used and destroyed, how they fail, and that they leave nothing behind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import os
import pickle
import re
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from ranks import Job, no_descriptor_left, ranks, tell, until_told, when_inside

import mscomm
from mscomm import job, log
from mscomm.cluster import member


def total(group, x=1.0):
    return float(mscomm.all_reduce(np.array([x]), group=group)[0])


# -- create_group


@ranks(4)
def test_a_ranks_place_in_the_list_is_its_rank_in_the_group(rank, group):
    made = mscomm.create_group("some", [3, 0, 2])
    if rank == 1:
        assert not made  # this rank is not a member, so its call does nothing, and no member waits for it
        return
    place = {3: 0, 0: 1, 2: 2}[rank]
    assert (made.name, made.rank, made.size, list(made.ranks)) == ("some", place, 3, [3, 0, 2])
    assert mscomm.get_rank(made) == mscomm.get_rank("some") == place
    assert mscomm.get_group_size("some") == mscomm.get_world_size("some") == 3
    assert mscomm.get_process_group_ranks("some") == [3, 0, 2]
    assert mscomm.all_gather(np.array([rank]), group=made).tolist() == [3, 0, 2]
    assert mscomm.broadcast(np.array([rank]), root=1, group="some")[0] == 0  # rank 1 of the group is rank 0 of the job
    assert mscomm.get_local_rank("some") == place and mscomm.get_local_rank_size("some") == 3


@ranks(3)
def test_a_rank_that_is_no_member_need_not_call(rank, group):
    if rank != 2:
        assert total(mscomm.create_group("pair", [0, 1])) == 2
    assert total(None) == 3


@ranks(2)
def test_the_same_name_and_ranks_again_is_the_group_that_is_there(rank, group):
    made = mscomm.create_group("pair", [0, 1])
    assert mscomm.create_group("pair", [0, 1]) is made
    for others in ([1, 0], [0]):
        with pytest.raises(ValueError, match=r"group 'pair' has the ranks \[0, 1\]"):
            mscomm.create_group("pair", others)
    assert total(made) == 2


@ranks(2)
def test_names_and_lists_of_the_wrong_kind_are_refused_and_send_nothing(rank, group):
    for name in (None, 7, b"pair"):
        with pytest.raises(TypeError, match="expected a str"):
            mscomm.create_group(name, [0, 1])
    for ids in ((0, 1), "01", 2, {0, 1}, None, np.array([0, 1])):
        with pytest.raises(TypeError, match="expected a list of ints"):
            mscomm.create_group("pair", ids)
    for ids in ([0, 1.0], ["0"], [None]):
        with pytest.raises(TypeError, match="is not an integer"):
            mscomm.create_group("pair", ids)
    for ids, text in (
        ([], "empty"),
        ([0, 2], "rank 2 is not a rank of group world, which has the ranks 0 to 1"),
        ([-1], "rank -1 is not a rank"),
        ([1, 1], "2 times"),
    ):
        with pytest.raises(ValueError, match=text):
            mscomm.create_group("pair", ids)
    for name in ("", "world", "hccl_world_group", "nccl_world_group", "mccl_world_group"):
        with pytest.raises(ValueError, match="choose another name"):
            mscomm.create_group(name, [0, 1])
    assert total(mscomm.create_group("pair", [0, np.int64(1)])) == 2


@ranks(2)
def test_groups_that_are_created_crosswise_are_a_mismatch(rank, group):
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    for name in names:
        with pytest.raises(mscomm.Mismatch, match=r"waits in create_group\('[ab]'\), and create_group\('[ab]'\) waits"):
            mscomm.create_group(name, [0, 1])
    assert total(mscomm.create_group("a", [0, 1])) == 2  # the job continues


@ranks(2)
def test_ranks_that_do_not_agree_on_the_list_are_a_mismatch(rank, group):
    with pytest.raises(
        mscomm.Mismatch, match=r"rank 0 .* named \[0, 1\].*rank 1 .* named \[1, 0\]|named \[1, 0\].*\[0, 1\]"
    ):
        mscomm.create_group("pair", [0, 1] if rank == 0 else [1, 0])
    assert total(mscomm.create_group("pair", [1, 0])) == 2  # the job continues after the mismatch


@ranks(3, env={"MS_TOPO_TIMEOUT": "1"})
def test_a_member_that_does_not_come_is_named(rank, group):
    mscomm.barrier()
    if rank != 2:
        with pytest.raises(mscomm.CollectiveTimeout, match=r"waited 1 s for rank 2") as caught:
            mscomm.create_group("all", [0, 1, 2])
        assert caught.value.waiting_for == (2,)
    mscomm.barrier()


@ranks(3)
def test_a_member_that_has_left_is_lost_to_those_that_create(rank, group):
    mscomm.barrier()
    if rank == 2:
        return
    with pytest.raises(mscomm.PeerLost, match="rank 2") as caught:
        mscomm.create_group("all", [2, 1, 0])
    assert caught.value.ranks == (2,)
    assert total(mscomm.create_group("rest", [0, 1])) == 2


@ranks(4)
def test_groups_of_disjoint_ranks_may_have_one_name(rank, group):
    made = mscomm.create_group("mine", [0, 1] if rank < 2 else [2, 3])
    assert total(made, rank) == (1 if rank < 2 else 5)


# -- ranks that are not members


@ranks(4)
def test_groups_that_all_ranks_make_and_use_never_give_another_groups_sum(rank, group):
    pairs = [mscomm.create_group("pair_a", [0, 1]), mscomm.create_group("pair_b", [2, 3])]
    seen = []
    for pair in pairs:
        try:
            seen.append(total(pair, rank))
        except RuntimeError as error:
            seen.append(str(error))
    other, members = ("pair_b", [2, 3]) if rank < 2 else ("pair_a", [0, 1])
    refused = (
        f"rank {rank} is no member of {other}: the members are {members}; only members may use a group (`if group:`)"
    )
    assert seen == ([1.0, refused] if rank < 2 else [refused, 5.0])


WORDS = {  # for the name of each argument, a value to pass
    "arrays": [np.ones(1)],
    "color": 0,
    "counts": [1],
    "dst": 0,
    "group_rank_id": 0,
    "name": "survivors",
    "network": lambda parameters: parameters[0],
    "obj": 1,
    "objs": [1],
    "out": np.ones(1),
    "parameters": [np.ones(1)],
    "reason": "because",
    "sendtag": 0,
    "send_counts": [1],
    "src": 0,
    "tensor": np.ones(1),
    "world_rank_id": 0,
    "x": np.ones(1),
}


def functions_of_groups():
    """Yield the name of each public function that takes a group, and a function that calls it with a given group."""
    public = {name: getattr(mscomm, name) for name in mscomm.__all__}
    public |= {f"train.{name}": getattr(mscomm.train, name) for name in mscomm.train.__all__}
    public |= {f"comm_func.{name}": f for name, f in vars(mscomm.communication.comm_func).items() if name[0] != "_"}
    for name, function in public.items():
        if not callable(function) or name in ("Work", "create_group", "destroy_group"):
            continue  # Work is a class; a rank that is no member may call create_group and destroy_group
        parameters = inspect.signature(function).parameters
        if "group" not in parameters:
            continue
        needed = [one for one, p in parameters.items() if p.default is p.empty and one != "group"]
        given = {one: WORDS[one] for one in needed}
        yield name, functools.partial(lambda function, given, group: function(**given, group=group), function, given)
    operators = {
        "AllReduce": (), "AllGather": (), "ReduceScatter": (), "Broadcast": (0,), "Reduce": (0,),
        "CollectiveGather": (0,), "CollectiveScatter": (0,), "AlltoAll": (1, 0, 0), "Barrier": (), "Send": (0, 0),
        "Receive": (0, 0, [1], np.float32),
    }  # fmt: skip
    known = {name for name, one in vars(mscomm.ops).items() if dataclasses.is_dataclass(one) and name[0] != "_"}
    assert known == set(operators)
    for name, words in operators.items():
        x = () if name in ("Barrier", "Receive") else (np.ones(1),)
        made = getattr(mscomm.ops, name)
        yield (
            f"ops.{name}",
            functools.partial(lambda made, words, x, group: made(*words, group=group)(*x), made, words, x),
        )


@ranks(2)
def test_every_use_of_a_group_by_a_rank_that_is_no_member_raises(rank, group):
    outside = mscomm.create_group("pair_b", [0])
    part = mscomm.split(0 if rank == 0 else None)
    if rank == 0:
        assert outside and part
        return
    assert not outside and not part
    assert (outside.name, outside.ranks) == ("pair_b", [0])
    assert repr(outside) == "<mscomm.Group pair_b: rank 1 is not a member>"
    wrong = {}
    functions = dict(functions_of_groups())
    assert len(functions) > 40
    for name, call in functions.items():
        for meant, words in (
            (outside, "pair_b"),
            ("pair_b", "pair_b"),
            (part, "world.1.None: it gave split the color"),
        ):
            try:
                wrong[name] = f"no error: {call(meant)}"
            except Exception as error:
                if not isinstance(error, RuntimeError) or not str(error).startswith(f"rank 1 is no member of {words}"):
                    wrong[name] = repr(error)
    assert wrong == {}
    for one in (outside, part):
        for attribute in ("rank", "core", "anything"):
            with pytest.raises(RuntimeError, match="rank 1 is no member of"):
                getattr(one, attribute)
            assert getattr(one, attribute, None) is None and not hasattr(one, attribute)
    assert outside.size == 1 and getattr(part, "size", None) is None
    with pytest.raises(RuntimeError, match=r"rank 1 is no member of world\.1\.None"):
        _ = part.ranks


@ranks(2)
def test_an_object_that_holds_a_group_can_be_copied_but_not_pickled(rank, group):
    pair, outside = mscomm.create_group("pair", [0, 1]), mscomm.create_group("one", [1 - rank])
    for one in (pair, outside):
        copied = copy.deepcopy({"weights": [1], "group": one})
        assert copied["group"] is one and copy.copy(one) is one
    with pytest.raises(TypeError, match="group 'pair' cannot be pickled, because it belongs to this process"):
        pickle.dumps(pair)
    assert mscomm.all_reduce(np.ones(1), group=copied and pair)[0] == 2


@ranks(3)
def test_a_rank_that_is_no_member_may_forget_the_name_and_use_it_for_another_group(rank, group):
    first = mscomm.create_group("pair", [0, 1])
    if rank == 2:
        # This call gives the name to a new group, which has the ranks in another order.
        again = mscomm.create_group("pair", [1, 0])
        assert again.ranks == [1, 0] and not first
        mscomm.destroy_group(first)
        with pytest.raises(RuntimeError, match=r"no member of pair: the members are \[1, 0\]"):
            mscomm.barrier(group="pair")
        mscomm.destroy_group("pair")
        with pytest.raises(ValueError, match="no group is named 'pair'"):
            mscomm.barrier(group="pair")
        with pytest.raises(RuntimeError, match="no member of pair"):
            mscomm.barrier(group=again)
        mscomm.create_group("pair", [0])
        own = mscomm.create_group("pair", [2])
        assert own and mscomm.get_rank("pair") == 0
        with pytest.raises(ValueError, match=r"group 'pair' has the ranks \[2\]"):
            mscomm.create_group("pair", [0, 1])
    assert total(None) == 3


# -- names


@ranks(2)
def test_a_group_is_meant_by_itself_by_its_name_and_by_nothing_else(rank, group):
    made = mscomm.create_group("pair", [1, 0])
    for meant in (made, "pair"):
        assert total(meant) == 2
    for world in (None, "hccl_world_group", "nccl_world_group", "mccl_world_group"):
        assert mscomm.get_rank(world) == rank
    with pytest.raises(ValueError, match="no group is named 'pairs'; the groups are world, pair"):
        mscomm.get_rank("pairs")
    with pytest.raises(TypeError, match="group is a int"):
        mscomm.get_rank(0)
    assert "pair" in repr(made)


@ranks(3)
def test_ranks_of_the_world_and_of_a_group_are_told_from_each_other(rank, group):
    if rank == 1:
        return
    mscomm.create_group("ends", [2, 0])
    assert [mscomm.get_world_rank_from_group_rank("ends", i) for i in range(2)] == [2, 0]
    assert [mscomm.get_group_rank_from_world_rank(i, "ends") for i in (0, 2)] == [1, 0]
    assert mscomm.get_world_rank_from_group_rank("hccl_world_group", 1) == 1
    with pytest.raises(ValueError, match=r"rank 1 is not in group ends \[2, 0\]"):
        mscomm.get_group_rank_from_world_rank(1, "ends")
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match=r"group_rank_id -?\d is not a rank of group ends, which has the ranks 0"):
            mscomm.get_world_rank_from_group_rank("ends", wrong)
    with pytest.raises(ValueError, match="world_rank_id 3 is not a rank of group world, which has the ranks 0 to 2"):
        mscomm.get_group_rank_from_world_rank(3, "ends")
    for wrong in ("0", 1.0, None):
        with pytest.raises(TypeError, match="is not an integer"):
            mscomm.get_world_rank_from_group_rank("ends", wrong)
        with pytest.raises(TypeError, match="is not an integer"):
            mscomm.get_group_rank_from_world_rank(wrong, "ends")


# -- split


@ranks(5)
def test_split_orders_by_key_and_then_by_rank(rank, group):
    parity = mscomm.split(rank % 2, key=-rank)
    assert list(parity.ranks) == ([4, 2, 0] if rank % 2 == 0 else [3, 1])
    assert mscomm.all_gather(np.array([rank]), group=parity).tolist() == list(parity.ranks)
    same = mscomm.split(rank % 2)  # a second split creates new groups
    assert list(same.ranks) == [r for r in range(5) if r % 2 == rank % 2]
    assert same.name != parity.name
    part = mscomm.split(None if rank == 3 else 7)
    assert not part if rank == 3 else list(part.ranks) == [0, 1, 2, 4]
    assert total(parity) == total(same) == (3 if rank % 2 == 0 else 2)


@ranks(4)
def test_a_group_can_be_split_like_the_world(rank, group):
    half = mscomm.split(rank // 2, key=-rank)
    alone = mscomm.split(half.rank, group=half)
    assert list(alone.ranks) == [rank]
    assert total(alone) == 1
    for color, key in (("a", 0), (0, "b"), (1.5, 0)):
        with pytest.raises(TypeError):
            mscomm.split(color, key)
    assert total(None) == 4


# -- destroy_group


@ranks(2)
def test_a_destroyed_group_is_no_group_any_more_and_its_name_is_free(rank, group):
    made = mscomm.create_group("pair", [0, 1])
    assert total(made) == 2
    mscomm.destroy_group("pair")
    with pytest.raises(ValueError, match="was destroyed"):
        mscomm.all_reduce(np.ones(1), group=made)
    with pytest.raises(ValueError, match="no group is named 'pair'"):
        mscomm.barrier(group="pair")
    with pytest.raises(ValueError, match="was destroyed"):
        mscomm.destroy_group(made)
    again = mscomm.create_group("pair", [1, 0])
    assert list(again.ranks) == [1, 0] and total(again) == 2


@ranks(2)
def test_the_group_of_all_ranks_cannot_be_destroyed(rank, group):
    for world in ("hccl_world_group", "world"):
        with pytest.raises(ValueError, match="ends with release"):
            mscomm.destroy_group(world)
    assert total(None) == 2


@pytest.mark.parametrize("algo", ["", "direct"])
@ranks(3, env={"MSCOMM_ALGO": "{algo}"})
def test_who_destroys_a_group_while_others_wait_in_it_is_named(rank, group, algo):
    made = mscomm.create_group("all", [0, 1, 2])
    assert total(made) == 3
    if rank == 1:
        until_told("rank 0 waits", "rank 2 waits")
        mscomm.destroy_group(made)
    else:
        when_inside(2, lambda: tell(f"rank {rank} waits"), made)
        with pytest.raises(mscomm.Error, match="rank 1 "):
            mscomm.barrier(group=made, timeout=60)
    assert total(None) == 3  # the world still works


# -- several groups at once


@pytest.mark.parametrize("algo", ["", "direct"])
@ranks(3, env={"MSCOMM_ALGO": "{algo}"})
def test_two_threads_use_two_groups_that_overlap(rank, group, algo):
    chains = [mscomm.create_group("left", [0, 1]), mscomm.create_group("right", [1, 2])]
    wrong = []

    def use(mine, size):
        x = mscomm.empty(size, np.int64)
        for i in range(60):
            x[...] = i + rank
            got = mscomm.all_reduce(x, group=mine)
            if not (got == sum(i + other for other in mine.ranks)).all():
                wrong.append((mine.name, i))
            if mscomm.broadcast(np.array([rank]), root=i % mine.size, group=mine)[0] != mine.ranks[i % mine.size]:
                wrong.append((mine.name, i))

    mine = [one for one in (*chains, mscomm.job.resolve(None)) if one]
    threads = [threading.Thread(target=use, args=(one, 40_000 // (place + 1))) for place, one in enumerate(mine)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def in_use() -> dict[str, int]:
    """Return how many descriptors, mappings of heaps, threads, and bytes of its own heap this process uses."""
    gc.collect()
    heap = job.default().epoch.heap
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": sum("mscomm-heap" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "heap": heap.in_use() if heap else 0,
    }


@pytest.mark.parametrize(
    ("algo", "number"),
    [
        ("", 200),
        ("direct", 100),
        pytest.param("", 1000, marks=pytest.mark.long),
        pytest.param("direct", 200, marks=pytest.mark.long),
    ],
)
@ranks(2, timeout_s=200, env={"MSCOMM_ALGO": "{algo}"})
def test_many_groups_leave_nothing_behind(rank, group, algo, number):
    member = job.default().member
    before = None
    for i in range(number):
        made = mscomm.create_group(f"number {i % 10}", [0, 1] if i % 3 else [1, 0])
        if i % 10 == 0:
            assert mscomm.all_reduce(np.ones(1), group=made, async_op=True).wait() == [2]  # starts a worker thread
        else:
            assert total(made) == 2
        mscomm.destroy_group(made)
        if i == 20:
            mscomm.barrier()
            before = in_use()
    mscomm.barrier()
    after = in_use()
    # `before` can be larger than `after`: when `before` was read, the peer may not have freed its part of the last
    # group yet.
    assert all(after[what] <= before[what] for what in before), (before, after)
    assert list(job.default().groups) == ["world"]
    tables = (member._communicators, member._links, member._early, member._told, member._verdicts, member._met)
    assert [len(table) for table in tables] == [1, 1, 0, 0, 0, 0]


HUB_SEES = """
import numpy as np, mscomm
mscomm.init()
for i in range(30):
    made = mscomm.create_group(f"number {i}", [0, 1])
    mscomm.all_reduce(np.ones(1), group=made)
    mscomm.destroy_group(made)
pair = mscomm.split(0)
mscomm.destroy_group(pair)
mscomm.barrier()
"""


def test_the_hub_forgets_groups_that_all_have_left(tmp_path: Path) -> None:
    job = Job(2, [sys.executable, "-c", HUB_SEES], tmp_path)
    assert job.wait(60) == [0, 0], job.logs()
    assert [group.id for group in job.hub._groups] == ["0:world"]
    assert job.hub._meetings._open == {}


@pytest.mark.parametrize("name", ["", "world", "hccl_world_group", "world.1.0", "pair.2.-1", "x" * 201, "\udc80"])
def test_names_that_are_taken_or_cannot_travel_are_refused(name):
    mscomm.init()
    try:
        for make in (lambda: mscomm.create_group(name, [0]), lambda: mscomm.shrink(None, name)):
            with pytest.raises(ValueError, match=r"shrink|create_group"):
                make()
    finally:
        mscomm.release()


def test_colors_and_keys_have_64_bits():
    mscomm.init()
    try:
        for color, key in ((1 << 63, 0), (0, -(1 << 63) - 1)):
            with pytest.raises(ValueError, match="has more than 64 bits"):
                mscomm.split(color, key)
    finally:
        mscomm.release()


@ranks(3)
def test_abort_reaches_every_group_and_those_that_are_made_later(rank, group):
    own = mscomm.create_group("own", [rank])
    pair = mscomm.create_group("pair", [1, 2])
    if rank == 0:
        mscomm.barrier()  # wait until all ranks have created their groups
        mscomm.abort("stop")
    for one in (None, own, pair) if pair else (None, own):
        with pytest.raises(mscomm.Aborted, match="rank 0 called abort: stop"):
            while True:  # in a group of one rank, calls succeed until the rank learns of the abort
                mscomm.barrier(group=one)
    for members in ([rank], [0, 1, 2]):
        with pytest.raises(mscomm.Aborted, match="rank 0 called abort: stop") as caught:
            mscomm.create_group(f"new {len(members)}", members)
        assert caught.value.ranks == (0,)
    with pytest.raises(mscomm.Aborted, match="rank 0 called abort: stop"):
        mscomm.split(0)


@ranks(2, expect={0: 1})
def test_an_uncaught_exception_ends_create_group_elsewhere_with_its_text(rank, group):
    if rank == 0:
        raise KeyError("no such key")
    with pytest.raises(mscomm.Aborted, match=r"rank 0: KeyError: 'no such key' \(test_groups.py:\d+\)"):
        mscomm.create_group("both", [0, 1])


class Enough(Exception):
    """Raised by a signal handler."""


def when_the_main_thread_meets(number: int) -> None:
    """Wait until the main thread is waiting for the other ranks of a meeting. Then send the signal to this process."""
    main = threading.main_thread().ident

    def functions() -> list[str]:
        return [frame.name for frame in traceback.extract_stack(sys._current_frames()[main])]

    while functions()[-2:] != ["_await", "wait_for"]:
        time.sleep(0.002)
    os.kill(os.getpid(), number)


@ranks(3)
def test_a_rank_that_is_interrupted_in_create_group_ends_that_for_all_and_nothing_else(rank, group):
    def handler(number, frame):
        raise Enough("of waiting")

    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        threading.Thread(target=when_the_main_thread_meets, args=(signal.SIGALRM,), daemon=True).start()
        with pytest.raises(Enough):
            mscomm.create_group("all", [0, 1, 2])
        tell("it is over")
    else:
        if rank == 2:
            until_told("it is over")
        with pytest.raises(mscomm.Aborted, match=r"rank 0: create_group\('all'\): .*Enough: of waiting") as caught:
            mscomm.create_group("all", [0, 1, 2])
        assert caught.value.ranks == (0,)
    assert total(None) == 3
    assert total(mscomm.create_group("all", [0, 1, 2])) == 3


@ranks(2)
def test_a_rank_without_room_for_a_group_tells_the_others(rank, group):
    if rank == 0:
        heap = job.default().epoch.heap

        class Full:
            def reserve_control(self, ranks):
                raise MemoryError("no room for a group's control memory in the shared heap")

        job.default().epoch.heap = Full()
        with pytest.raises(MemoryError):
            mscomm.create_group("all", [0, 1])
        job.default().epoch.heap = heap
    else:
        with pytest.raises(mscomm.Aborted, match=r"rank 0: create_group\('all'\): MemoryError: no room"):
            mscomm.create_group("all", [0, 1])
    assert total(None) == 2
    assert total(mscomm.create_group("all", [0, 1])) == 2


@pytest.mark.parametrize("algo", ["", "direct"])
@ranks(2, env={"MSCOMM_ALGO": "{algo}"})
def test_a_call_on_a_group_that_a_peer_destroyed_ends_and_says_so(rank, group, algo):
    for turn in range(2):
        pair = mscomm.create_group("pair", [0, 1])
        assert total(pair) == 2
        if rank == turn:
            mscomm.destroy_group(pair)
        else:
            with pytest.raises(mscomm.PeerLost, match=rf"rank {turn} .*has destroyed the group") as caught:
                mscomm.barrier(group=pair, timeout=600)
            assert caught.value.ranks == (turn,)
            mscomm.destroy_group(pair)
        mscomm.barrier()


@ranks(3, env={"MSCOMM_HOST_ID": "{rank}", "MS_TOPO_TIMEOUT": "100"})
def test_a_rank_without_descriptors_is_the_one_that_is_named(rank, group):
    if rank == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Leave fewer descriptors than the three that create_group needs: for a listener, for a connection to rank 0,
        # and for a connection from rank 2.
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
        with pytest.raises(OSError, match="Too many open files"):
            mscomm.create_group("all", [0, 1, 2])
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        until_told("rank 0", "rank 2")
        return
    with pytest.raises(mscomm.Aborted, match=r"rank 1: .*Too many open files"):
        mscomm.barrier(group=mscomm.create_group("all", [0, 1, 2]))  # create_group may succeed on rank 0
    tell(f"rank {rank}")


@ranks(2)
def test_a_rank_without_a_descriptor_for_the_core_of_a_group_is_named(rank, group):
    mscomm.barrier(group=mscomm.create_group("first", [0, 1]))  # imports all modules before the descriptors run out
    with contextlib.ExitStack() as stack:
        if rank == 1:
            # On one host, the group has no mesh, so the ranks need no descriptors to meet. After they have met, each
            # rank's core needs one for its mailbox.
            stack.enter_context(no_descriptor_left())
        with pytest.raises(mscomm.Aborted, match=r"rank 1: group all: .*Too many open files; .* `ulimit -n`") as caught:
            mscomm.barrier(group=mscomm.create_group("all", [0, 1]))  # on rank 0, create_group succeeds
    assert caught.value.ranks == (1,)
    if rank == 1:
        tell("seen")
    until_told("seen")


@ranks(3)
def _waits_to_found(rank, group):
    mscomm.barrier()
    member.NOTICES_S = (0.5, 60, 300)  # say soon that it waits, and not again in this test
    notice = log.notice

    def notice_and_tell(text):
        notice(text)
        tell("said")

    log.notice = notice_and_tell
    if rank == 2:
        until_told("said")
    mscomm.create_group("late", [0, 1, 2])


def test_a_long_wait_in_create_group_says_once_whom_it_waits_for(tmp_path):
    _waits_to_found(tmp_path=tmp_path)
    logs = "".join((tmp_path / f"rank_{rank}.log").read_text() for rank in range(3))
    (line,) = [line for line in logs.splitlines() if "has waited" in line]
    assert re.search(r"rank 0: create_group\('late'\) has waited \d+ s for rank 2 \(pid \d+ on host ", line)
