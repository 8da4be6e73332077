"""Creates and destroys groups of some of the job's ranks: create_group, split, shrink, destroy_group."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mscomm.arguments import checked_int, checked_rank
from mscomm.cluster import assemble
from mscomm.cluster.deadline import Deadline, seconds_of
from mscomm.cluster.member import SETTLE_S, Met
from mscomm.errors import Error
from mscomm.group import Group, NonMember, printable
from mscomm.job import WORLD_NAMES, Job, Making, default, job_of, resolve, unforked
from mscomm.works import Timeout

_NAME_BYTES = 200
_NAME_OF_SPLIT = re.compile(r"\.\d+\.-?\d+$")


def create_group(group: str, rank_ids: list[int], *, timeout: Timeout = None, job: Job | None = None) -> Group:
    """Create a group of some of the ranks. All ranks of the new group must pass the same name and the same list.

    rank_ids: ranks in the world; a rank's index in the list is its rank in the group. A rank that is not in the list
    need not call create_group. If it does, nothing is sent, and the call returns a Group whose truth value is False, so
    the rank can test `if group:`. Any other use of this Group, or of its name, raises RuntimeError. If a group with
    this name and the same ranks already exists, that group is returned. Groups may overlap, and two threads may use two
    groups at once. create_group returns when all ranks in the list have called it. Therefore, ranks that are in several
    groups must create these groups in the same order.

    timeout: the default timeout of the group's calls, in seconds or as a timedelta; None means that of its job. job:
    the Job whose ranks form the group; None means the default job, which init() has joined.

    Raise TypeError if group is not a str or rank_ids is not a list of ints. Raise ValueError if the list is empty,
    contains an invalid rank or contains a rank twice, or if a group of other ranks already has this name. Raise
    Mismatch if the ranks passed different lists, PeerLost if one of them is lost, and CollectiveTimeout if they have
    not all called create_group within the job's join_timeout (see init). If a signal handler's exception ends
    create_group on one rank, the other ranks raise Aborted, at the latest in their first call on the group.

    >>> pair = mscomm.create_group("pair", [0, 1])
    >>> if pair:                                                           # ranks 0 and 1
    ...     print(mscomm.all_reduce(np.ones(1), group=pair))
    [2.]
    """
    job = default() if job is None else _current(job)
    timeout_s = job.timeout_s if timeout is None else seconds_of(timeout, "create_group")
    if not isinstance(group, str):
        raise TypeError(f"create_group: the name is a {type(group).__name__}, expected a str")
    if not isinstance(rank_ids, list):
        raise TypeError(f"create_group: rank_ids is a {type(rank_ids).__name__}, expected a list of ints")
    _check_name("create_group", group)
    ranks = [checked_rank("create_group", "rank", rank, job.world) for rank in rank_ids]
    if not ranks:
        raise ValueError("create_group: rank_ids is empty")
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise ValueError(f"create_group: rank {twice} is in rank_ids {ranks.count(twice)} times")
    there = job.groups.get(group)
    if there is not None:
        if there.ranks != ranks:
            raise ValueError(f"create_group: group {group!r} has the ranks {there.ranks}; destroy_group it first")
        return there
    if job.rank not in ranks:
        job.others[group] = NonMember(group, ranks, job)
        return job.others[group]
    made = Group(group, ranks, timeout_s)
    _carry_out(job, Making(made, lambda deadline: job.found(made, deadline)))
    return made


def create_variant(group: str, algo: str) -> Group:
    """Create another group of all ranks, to measure algorithms. Its collectives use the algorithms `algo`.

    All ranks must call this. algo: a string in the format of MSCOMM_ALGO. Raise ValueError if algo is invalid; the
    other errors are those of create_group. rejoin() does not create the group again.
    """
    job = default()
    made = Group(group, list(job.world.ranks), job.timeout_s)
    job.found(made, job.deadline(), assemble.forced_algorithms(algo))
    return made


def split(color: int | None, key: int = 0, *, group: Group | str | None = None, timeout: Timeout = None) -> Group:
    """Split a group: the ranks that pass the same color form a new group, ordered by key, then by rank.

    All ranks of the group must call split; group=None splits the world. Return this rank's new group. A rank that
    passes color=None is in none of the new groups. It gets a Group whose truth value is False, like the one that
    create_group returns to a rank that is not in the list. timeout: the default timeout of the new group's calls; None
    means that of `group`. The errors are those of create_group. This is like MPI_Comm_split.
    """
    parent = resolve(group)
    job = job_of(parent)
    timeout_s = parent.timeout_s if timeout is None else seconds_of(timeout, "split")
    color = None if color is None else _in_64_bits("color", color)
    key = _in_64_bits("key", key)

    name = f"split of group {parent.name}"

    def group_of(said: Sequence[Mapping[str, Any]], turn: int) -> tuple[str, list[int]]:
        """Return the name and the ranks of this rank's new group. said: what each rank of the parent has passed."""
        mine = said[parent.rank]["color"]
        alike = [(fact["key"], place) for place, fact in enumerate(said) if fact["color"] == mine]
        return f"{parent.name}.{turn}.{mine}", [parent.ranks[place] for _, place in sorted(alike)]

    def refuse(said: Sequence[Mapping[str, Any]], turn: int, error: BaseException) -> None:
        """Tell the ranks of the new group that this rank does not come, because a signal handler has raised `error`."""
        if said[parent.rank]["color"] is not None:
            job.refuse(*group_of(said, turn), error)

    def found(deadline: Deadline) -> None:
        begun = False  # whether job.found() was called, which tells the other ranks by itself
        turn = job.splits.get(parent.name, 0) + 1
        facts = {"color": color, "key": key}
        said: Sequence[Mapping[str, Any]] | None = None if job.member else [facts]
        meeting = _meeting(job, parent, turn)
        try:
            # If a signal handler has interrupted an earlier attempt, this rank may not know that all ranks had come.
            while job.member and (met := job.member.hear_out(meeting, name, deadline)):
                refuse(met.facts, turn, RuntimeError(f"{name} was interrupted"))
                turn += 1
                meeting = _meeting(job, parent, turn)
            if said is None:
                assert job.member
                said = job.member.meet(meeting, name, parent.ranks, facts, deadline, records=True).facts
            job.splits[parent.name] = turn
            if job.member:
                job.member.recorded(meeting)
            before, (made.name, ranks) = made.name, group_of(said, turn)
            if color is None:
                return
            # In an earlier epoch, the group may have had another name. Remove the entry with that name.
            job.groups.pop(before, None)
            made.ranks, made.size = ranks, len(ranks)
            begun = True
            job.found(made, deadline)
        except Error:
            raise
        except BaseException as error:
            if said is None and (met := _after_all(job, meeting, name)):
                said = met.facts
            if said is not None and not begun:
                refuse(said, turn, error)
                job.splits[parent.name] = turn
            raise

    made = Group("", [], timeout_s) if color is not None else NonMember("", None, job)
    _carry_out(job, Making(made, found))
    return made


def _carry_out(job: Job, making: Making) -> None:
    """Make the group, and let rejoin() make it again."""
    try:
        job.makings.append(making)
        making.make(job.deadline())
    except BaseException:
        if job.groups.get(making.group.name) is not making.group:
            job.makings.remove(making)
        raise


def _after_all(job: Job, meeting: str, name: str) -> Met | None:
    """A signal handler has interrupted the meeting. Return its result if the ranks have met, or None."""
    with contextlib.suppress(Error):
        return job.member.hear_out(meeting, name, Deadline(SETTLE_S)) if job.member else None
    return None


def _meeting(job: Job, parent: Group, turn: int) -> str:
    """Return the key of the meeting of split() in this group. turn: 1 for the first meeting, 2 for the next, ..."""
    return f"{job.epoch.number}:split {turn}:{parent.id}"


def shrink(group: Group | str | None, name: str) -> Group:
    """After PeerLost, create a new group of the surviving ranks of `group`, in the same order.

    All surviving ranks must call shrink. The new group exists until rejoin(). The errors are those of create_group.
    """
    parent = resolve(group)
    job = job_of(parent)
    _check_name("shrink", name)
    if name in job.groups:
        raise ValueError(f"shrink: there is a group {name!r} already")
    deadline = job.deadline()
    ranks = parent.ranks
    meeting, what = f"{job.epoch.number}:shrink to {name}:{parent.id}", f"shrink to {name!r}"
    begun = False
    try:
        if job.member:
            ranks = job.member.meet(meeting, what, ranks, {}, deadline, survivors=True, records=True).ranks
        made = Group(name, ranks, parent.timeout_s)
        begun = True
        job.found(made, deadline)
    except Error:
        raise
    except BaseException as error:
        if not begun and (met := _after_all(job, meeting, what)):
            job.refuse(name, met.ranks, error)
        raise
    finally:
        if job.member:
            job.member.recorded(meeting)
    return made


def destroy_group(group: Group | str) -> None:
    """Leave the group and free its memory. A rank that is not in the group only forgets the group's name.

    Asynchronous calls are treated as by release().
    Raise ValueError for the world.
    """
    outside = default().others.get(group) if isinstance(group, str) else group
    if isinstance(outside, NonMember):
        job = unforked(outside.job) if outside.job else default()
        job.makings = [making for making in job.makings if making.group is not outside]
        if job.others.get(outside.name) is outside:
            del job.others[outside.name]
        return
    found = resolve(group)
    job = job_of(found)
    if found is job.world:
        raise ValueError("destroy_group: the group of all ranks ends with release()")
    if job.groups.get(found.name) is found:  # not if a signal handler has interrupted an earlier call
        del job.groups[found.name]
    job.makings = [making for making in job.makings if making.group is not found]
    found.drain()
    found.leave()
    found.job = None


def _current(job: Job) -> Job:
    """Return the job that the user has passed. Raise TypeError if it is not a Job, and ValueError if it has ended."""
    if not isinstance(job, Job):
        raise TypeError(
            f"create_group: job is a {type(job).__name__}; expected a Job that join() has returned, or None"
        )
    job_of(job.world)
    return job


def _check_name(function: str, name: str) -> None:
    if name == "world" or name in WORLD_NAMES or not name:
        raise ValueError(f"{function}: {name!r} is the group of all ranks; choose another name")
    if _NAME_OF_SPLIT.search(name):
        raise ValueError(f"{function}: names that end in two numbers, such as {name!r}, are reserved for split")
    if len(printable(name)) > _NAME_BYTES or printable(name) != name:
        raise ValueError(
            f"{function}: a name must be valid UTF-8 and have at most {_NAME_BYTES} characters; got {name!r:.300}"
        )


def _in_64_bits(argument: str, number: int) -> int:
    number = checked_int("split", argument, number)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"split: {argument} {number} has more than 64 bits")
    return number
