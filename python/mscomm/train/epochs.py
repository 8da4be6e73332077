"""Tells datasets and samplers the number of each epoch, because the order of their rows may depend on this number.

Before each epoch, Epochs calls set_epoch() on the dataset and on the samplers of a PyTorch DataLoader, if they have
this method. Without these calls, torch.utils.data.DistributedSampler, for example, would use the same order in every
epoch. Epochs are counted from 0. A script may call set_epoch() itself, before train() or in a callback. The script's
number then takes effect, and later epochs continue from it. A second call of train() continues the first call's
numbers. A dataset with state_dict and load_state_dict, such as an mscomm dataset, counts its passes itself. For such a
dataset, Epochs calls set_epoch() only once, if initial_epoch is given.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

_PLACES = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")
_last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # the latest epoch number of each object


def knows_its_place(dataset: Any) -> bool:
    return hasattr(dataset, "load_state_dict") and hasattr(dataset, "state_dict")


class Epochs:
    """Keeps the objects whose set_epoch() a training run calls, and the epoch numbers of these objects."""

    def __init__(self, dataset: Any, initial_epoch: int, resumed: dict[str, int] | None, first: int) -> None:
        """initial_epoch: the argument of train(). first: the number of the first epoch of this run. resumed: the result
        of numbers() in the checkpoint from which training resumes, {} if an earlier version of mscomm wrote this
        checkpoint, or None if training does not resume from a checkpoint."""
        self._found: dict[str, Any] = {}
        # For each place: the number of the next epoch, which initial_epoch or the checkpoint gives.
        self._next: dict[str, int] = {}
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
        """Tell the objects the number of the epoch that is about to begin. Call this before each epoch, and before the
        callbacks' epoch_begin."""
        for place, one in self._found.items():
            number = self._next.pop(place) if place in self._next else self._after(place)
            one.set_epoch(number)
            self._told[place] = number
            with contextlib.suppress(TypeError):  # for objects that do not support weak references
                _last[one] = number

    def numbers(self, ended: bool) -> dict[str, int]:
        """Return the objects' numbers for a checkpoint: their numbers for the next epoch if the current epoch has
        ended or has not begun, otherwise their numbers for the current epoch."""
        numbers = {place: self._after(place) if ended else self._there(place, 0) for place in self._found}
        return {**numbers, **self._next}

    def _after(self, place: str) -> int:
        """Return the number that the object gets for the next epoch."""
        last = self._told.get(place, -1)
        if last < 0:
            with contextlib.suppress(TypeError):
                last = _last.get(self._found[place], -1)
        there = self._there(place, last)
        return last + 1 if there == last else there  # if the numbers differ, the script has called set_epoch()

    def _there(self, place: str, otherwise: int) -> int:
        """Return the number that the object has now. If this number cannot be read, return the number that begin() has
        set, or `otherwise` if begin() was not called yet."""
        number = getattr(self._found[place], "epoch", None)
        return number if isinstance(number, int) else self._told.get(place, otherwise)
