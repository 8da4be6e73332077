"""Tells the number of the epoch to datasets and samplers that draw the order of their data from it.

Before each epoch, Epochs calls set_epoch() of the dataset or of the samplers of a PyTorch DataLoader, a method as
torch.utils.data.DistributedSampler has it. Numbers begin at 0. Without these calls, such a sampler gives every epoch
the same order. A script may call set_epoch() itself, before train() or in a callback. That number takes effect, and
later epochs count on from it. A second train() counts on, too. Datasets that know their place (state_dict,
load_state_dict), such as mscomm's, count their passes themselves.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

_PLACES = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")
_last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # the number that each object was given last


def knows_its_place(dataset: Any) -> bool:
    return hasattr(dataset, "load_state_dict") and hasattr(dataset, "state_dict")


class Epochs:
    """The objects of one training that draw their order from the epoch."""

    def __init__(self, dataset: Any, initial_epoch: int, resumed: dict[str, int] | None, first: int) -> None:
        """initial_epoch: the argument of train(). first: the epoch in which training begins. resumed: what numbers()
        returned for the checkpoint from which training resumes; empty for checkpoints of earlier versions."""
        self._found: dict[str, Any] = {}
        self._next: dict[str, int] = {}  # the next numbers that do not follow from the previous epoch
        self._told: dict[str, int] = {}
        for place in _PLACES:
            one = dataset
            for name in filter(None, place.split(".")):
                one = getattr(one, name, None)
            if not callable(getattr(one, "set_epoch", None)) or any(one is known for known in self._found.values()):
                continue
            if resumed is not None:
                self._next[place] = resumed.get(place, first)
            elif initial_epoch:
                self._next[place] = initial_epoch
            self._found[place] = one
        if "" in self._found and knows_its_place(dataset):
            del self._found[""]
            if initial_epoch:
                dataset.set_epoch(initial_epoch)

    def begin(self) -> None:
        """Give the objects the number of the epoch. Call it before each epoch, and before the callbacks'
        epoch_begin."""
        for place, one in self._found.items():
            number = self._next.pop(place) if place in self._next else self._after(place)
            one.set_epoch(number)
            self._told[place] = number
            with contextlib.suppress(TypeError):  # the object cannot be a weak key
                _last[one] = number

    def numbers(self, ended: bool) -> dict[str, int]:
        """The numbers for a checkpoint: of the current epoch, or of the next one if the current one has ended."""
        return {place: self._after(place) if ended else self._there(place, 0) for place in self._found}

    def _after(self, place: str) -> int:
        """The number of the next epoch."""
        last = self._told.get(place, -1)
        if last < 0:
            with contextlib.suppress(TypeError):
                last = _last.get(self._found[place], -1)
        there = self._there(place, last)
        return last + 1 if there == last else there  # a different number was set by the script

    def _there(self, place: str, otherwise: int) -> int:
        """The number that the object has now, if it can be read."""
        number = getattr(self._found[place], "epoch", None)
        return number if isinstance(number, int) else self._told.get(place, otherwise)
