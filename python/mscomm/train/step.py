"""Step keeps track of which gradients are ready, starts the reduction of full buckets, and holds the results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mscomm import collectives, objects
from mscomm.group import Group
from mscomm.train.buckets import Bucket, Layout, layouts
from mscomm.works import Work

# What a rank does next inside join(). LEFT: the rank has no batches left. FORWARD: it begins a forward pass, before
# which DistributedDataParallel sends buffers. REDUCES: it reduces gradients.
LEFT, FORWARD, REDUCES = 0, 1, 2


class Outcome(NamedTuple):
    """The result of a step."""

    carried: float = 0.0  # the mean of the numbers that the ranks passed to carry()
    from_others: Sequence[int] = ()  # the gradients that another rank had, and this rank did not
    moved: bool = False  # whether the gradients now lie in new buckets
    waited_s: float = 0.0  # how long this rank waited at the end of the step


class Step:
    """Holds the buckets and the state of the current step. Between two steps, no reduction is running.

    names, kinds, shapes: the name, the (dtype, number of elements) and the shape of each gradient. op: how the ranks of
    the group combine gradients, "avg" or "sum". make: a function that creates a bucket with a given layout. in_order:
    whether gradients become ready in the order in which `names` lists them. If not, Step assumes the reverse order
    until the first step has shown in which order rank 0's gradients become ready.
    """

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[tuple[np.dtype[Any], int]],
        shapes: Sequence[tuple[int, ...]],
        *,
        op: str,
        group: Group,
        make: Callable[[Layout], Bucket],
        bucket_bytes: int,
        in_order: bool,
    ) -> None:
        self._names = names
        self._kinds = kinds
        self._shapes = shapes
        self._op = op
        self._group = group
        self._make = make
        self._bucket_bytes = bucket_bytes
        self._order_is_final = in_order
        self.order_of_rank_0: list[int] | None = None  # None until a step has determined it
        self._order: list[int] = []  # the order in which this step's gradients became ready
        self._started = 0  # how many buckets of this step have been started; buckets start in order
        self._failed = False
        self.joining = False
        self.by_all = False  # inside join(): whether the mean also counts ranks that have left
        self._meeting: Work | None = None  # inside join(): a running all_gather of what each rank does next
        # Inside join(): what each rank does next, as returned by the latest all_gather in which at least one rank had
        # not left.
        self.last_met: np.ndarray[Any, Any] = np.zeros(group.size, np.int64)
        self._carry = 0.0
        self.outcome = Outcome()  # the result of the latest step
        self.waited_s = 0.0  # the sum over all steps
        self.finished = 0  # the number of steps whose gradients were reduced
        self._lay_out(list(range(len(kinds))) if in_order else list(range(len(kinds)))[::-1])

    @property
    def begun(self) -> bool:
        """Whether at least one gradient of this step is ready. If so, the first reductions may already have begun."""
        return bool(self._order)

    def check_between(self, function: str) -> None:
        """Raise RuntimeError in the middle of a step, or after a step that failed."""
        self._check_usable()
        if self.begun:
            raise RuntimeError(
                f"GradientReducer.{function}: gradients of a backward pass are still being reduced; call wait() first"
            )

    def _check_usable(self) -> None:
        if self._failed:
            raise RuntimeError("GradientReducer: a step of this reducer has failed; make a new one on every rank")

    @contextlib.contextmanager
    def owed(self) -> Iterator[None]:
        """Return a context for work that other ranks wait for. If the work raises an exception, the other ranks are
        notified, and this object becomes unusable."""
        self._check_usable()
        try:
            with self._group.committed("a step of GradientReducer"):
                yield
        except BaseException:
            self._failed = True
            raise

    # -- single gradients

    def ready(self, index: int, source: np.ndarray[Any, Any] | None = None) -> list[int]:
        """Record that the gradient is ready, either in its buffer or in source. Then start to reduce full buckets, in
        the order of the buckets.

        Return the indices of the gradients in the buckets that were started; these gradients now lie in their buffers.
        finish() starts the last bucket, so that the calling thread reduces it without a thread switch.
        """
        self._check_usable()
        bucket, turn = self._bucket_of[index]
        if bucket.there[turn]:
            raise RuntimeError(
                f"GradientReducer: the gradient of {self._names[index]} came twice in one step: call wait() after each"
                " backward pass, or use no_sync() to add several up"
            )
        if source is not None:
            bucket.put(turn, source)
        bucket.there[turn] = 1
        bucket.missing -= 1
        self._order.append(index)
        begun: list[int] = []
        if bucket.missing == 0:
            while self._started < len(self._buckets) - 1 and self._buckets[self._started].missing == 0:
                begun += (place.number for place in self._buckets[self._started].layout.places)
                self._start_next(async_op=True)
        return begun

    def missing(self) -> list[int]:
        """Return the indices of the gradients that are not ready yet in this step."""
        return [
            place.number
            for bucket in self._buckets
            if bucket.missing
            for place, there in zip(bucket.layout.places, bucket.there, strict=True)
            if not there
        ]

    def _was_used(self, index: int) -> bool:
        """Return whether any rank had this gradient. Call this when its bucket has been reduced."""
        bucket, turn = self._bucket_of[index]
        return bool(bucket.marks[turn] != 0)

    def clear(self) -> None:
        """Set all gradients to zero."""
        for bucket in self._buckets:
            bucket.clear()

    def carry(self, value: float) -> None:
        self._check_usable()
        if any(bucket is self._carrier for bucket in self._buckets[: self._started]):
            raise RuntimeError("GradientReducer.carry: too late for this step; call it before backward()")
        self._carry = value

    def where_is(self, gradient: np.ndarray[Any, Any]) -> int | None:
        """Return the index of the gradient whose buffer is this memory.

        Return -1 if the memory overlaps the buckets in another way, and None if it is outside the buckets. The memory
        must be in C order.
        """
        begin, end = span = _span(gradient)
        if not any(begin < last and first < end for first, last in self._spans):
            return None
        return self._gradient_at.get(span, -1)

    @property
    def order(self) -> list[int]:
        """The indices of the gradients in the order of the buckets."""
        return [place.number for bucket in self._buckets for place in bucket.layout.places]

    @property
    def bucket_count(self) -> int:
        return len(self._buckets)

    # -- inside join()

    def begin_join(self, by_all: bool) -> None:
        self.joining, self.by_all = True, by_all
        self.last_met = np.zeros(self._group.size, np.int64)

    def end_join(self) -> None:
        self.joining, self._meeting = False, None

    def meet(self, kind: int) -> np.ndarray[Any, Any]:
        """Tell the other ranks what this rank does next (`kind`). Return what each rank does next."""
        self._announce(kind)
        assert self._meeting is not None
        kinds = self._meeting.wait()
        if kinds.any():
            self.last_met = kinds
        if kinds.max() != REDUCES:
            self._meeting = None
        return kinds  # type: ignore[no-any-return]

    def _announce(self, kind: int) -> None:
        self._meeting = collectives.all_gather(np.array([kind]), group=self._group, async_op=True)

    # -- the end of a step, and the layout of the buckets

    def finish(self) -> Outcome:
        """Reduce the remaining buckets, with zeros for missing gradients, and wait for all buckets."""
        began = time.monotonic()
        while self._started < len(self._buckets):
            self._start_next(async_op=self._started < len(self._buckets) - 1)
        active = self._group.size
        if self._meeting is not None:
            self.last_met, self._meeting = self._meeting.wait(), None
            active = int(np.count_nonzero(self.last_met == REDUCES))
        if self._carrier is None:
            marks = [bucket.marks for bucket in self._buckets if not bucket.marks_go_along]
            facts = collectives.all_reduce(np.concatenate([[self._carry], *marks]), group=self._group)
            total = facts[0]
            for one, sums in zip(marks, np.split(facts[1:], np.cumsum([one.size for one in marks])), strict=False):
                one[:] = sums
        for bucket in self._buckets:
            bucket.finish()
            if self._op == "avg" and active < self._group.size and not self.by_all:
                bucket.scale(self._group.size / active)
        if self._carrier is not None:
            total = self._carrier.carried * (self._group.size if self._op == "avg" else 1)
        from_others = [index for index in self.missing() if self._was_used(index)]
        moved = not self._order_is_final and active == self._group.size
        if moved:
            last = [index for index in range(len(self._kinds)) if index not in set(self._order)]
            self.take_order(objects.broadcast_object([*self._order, *last], 0, group=self._group))
        self._order.clear()
        self._started = 0
        self._carry = 0.0
        for bucket in self._buckets:
            bucket.forget()
        self.outcome = Outcome(float(total) / active, from_others, moved, time.monotonic() - began)
        self.waited_s += self.outcome.waited_s
        self.finished += 1
        return self.outcome

    def _start_next(self, *, async_op: bool) -> None:
        """Start to reduce the next bucket."""
        bucket = self._buckets[self._started]
        bucket.carried = self._carry if bucket is self._carrier else 0.0
        with self.owed():
            if self.joining and self._started == 0 and self._meeting is None:
                self._announce(REDUCES)
            bucket.start(async_op)
        self._started += 1

    def _lay_out(self, order: list[int]) -> None:
        """Create the buckets for gradients that become ready in this order."""
        self._buckets = [self._make(one) for one in layouts(self._kinds, order, self._bucket_bytes)]
        self._bucket_of = {
            place.number: (bucket, turn) for bucket in self._buckets for turn, place in enumerate(bucket.layout.places)
        }
        # The number that was passed to carry() is sent with the last bucket that can carry it (see Bucket.carries). If
        # no bucket can, the number is sent in a separate call.
        carrying = [bucket for bucket in self._buckets if bucket.carries]
        self._carrier = carrying[-1] if carrying else None
        places = [self._bucket_of[index] for index in range(len(self._kinds))]
        self._gradient_at = {_span(bucket.parts[turn]): i for i, (bucket, turn) in enumerate(places)}
        self._spans = [_span(bucket.memory) for bucket in self._buckets]
        self.buffers = [
            bucket.array_of(turn, shape) for (bucket, turn), shape in zip(places, self._shapes, strict=True)
        ]

    # -- state for checkpoints: order and residuals

    def take_order(self, order: list[int]) -> None:
        """Rebuild the buckets, and move the gradients into the new buckets. order: the order in which the gradients of
        rank 0 became ready."""
        before = self._bucket_of
        self._lay_out(order)
        self._order_is_final, self.order_of_rank_0 = True, order
        for index, (bucket, turn) in self._bucket_of.items():
            bucket.take(turn, *before[index])

    def narrows(self, index: int) -> bool:
        """Return whether this gradient is compressed."""
        return self._bucket_of[index][0].residual is not None

    def residual(self, index: int) -> np.ndarray[Any, Any] | None:
        """Return a copy of this gradient's compression residual, or None without compression."""
        bucket, turn = self._bucket_of[index]
        owed = bucket.residual_of(turn)
        return None if owed is None else owed.reshape(self._shapes[index])

    def owe(self, index: int, residual: np.ndarray[Any, Any]) -> None:
        """Set this gradient's compression residual."""
        bucket, turn = self._bucket_of[index]
        bucket.owe(turn, residual)


def _span(memory: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return the addresses at which the memory begins and ends."""
    begin: int = memory.__array_interface__["data"][0]
    return begin, begin + memory.nbytes
