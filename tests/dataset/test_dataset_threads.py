"""num_parallel_workers: steps that run in several threads give results bit-identical to those of one thread."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from images import numbers
from pipelines import fails_at_5, fillers, given_by, none_is_left, ordered, same
from sessions import run

import mscomm.dataset as ds
from mscomm.dataset import vision


def threads_of(data: ds.Dataset) -> int:
    """Return the number of threads that work on a pass, not counting the thread that hands over the batches."""
    rows = iter(data)
    next(rows)
    count = len([thread for thread in threading.enumerate() if thread.name.startswith("mscomm-data-")])
    rows.close()
    return count


@pytest.fixture
def four_cpus(monkeypatch):
    """Pretend to have four CPUs, because num_parallel_workers is limited to the number of CPUs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def pixels(image: Any) -> Any:
    """Stands in for a function of the user's program."""
    return image[::2]


STEPS_WITH_THREADS = {
    "Cifar10Dataset": lambda folder, n: ds.Cifar10Dataset(folder, num_parallel_workers=n).map(pixels),
    "GeneratorDataset": lambda folder, n: ds.GeneratorDataset(numbers(50), "x", num_parallel_workers=n).repeat(2),
    "map": lambda folder, n: ds.Cifar10Dataset(folder).map(vision.RandomCrop(8), num_parallel_workers=n).batch(2),
    "batch": lambda folder, n: ds.Cifar10Dataset(folder).batch(5, num_parallel_workers=n).repeat(2),
}


@pytest.mark.parametrize("step", STEPS_WITH_THREADS)
def test_num_parallel_workers_is_the_number_of_threads_and_changes_no_bit(step, folder, four_cpus, no_thread_before):
    make = STEPS_WITH_THREADS[step]
    assert threads_of(make(folder, None)) == threads_of(make(folder, 1)) == 0 and threads_of(make(folder, 3)) == 3
    alone = make(folder, None)
    want = [row for _ in range(2) for row in alone]
    for ahead in (0, 2):
        ds.config.set_prefetch_size(ahead)
        data = make(folder, 4)
        assert same([row for _ in range(2) for row in data], want)
    assert none_is_left() and data.state_dict()["pipeline"] == alone.state_dict()["pipeline"]


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (0, ValueError, "num_parallel_workers=0; expected 1 to 4, the number of CPUs"),
        (5, ValueError, "num_parallel_workers=5; expected 1 to 4"),
        (True, TypeError, "num_parallel_workers is a bool"),
        ("2", TypeError, "num_parallel_workers is a str"),
    ],
)
@pytest.mark.parametrize("step", STEPS_WITH_THREADS)
def test_num_parallel_workers_is_checked(step, number, kind, said, folder, four_cpus):
    with pytest.raises(kind, match=f"{step}: {said}"):
        STEPS_WITH_THREADS[step](folder, number)


def test_a_pass_in_threads_goes_on_at_any_batch_with_the_same_bits(folder, four_cpus):
    def make(number: int | None) -> ds.Dataset:
        data = ds.Cifar10Dataset(folder, num_shards=2, shard_id=1)
        image = [vision.RandomCrop((32, 32), 4), vision.RandomHorizontalFlip(), vision.Resize(40), vision.HWC2CHW()]
        return data.map(image, "image", num_parallel_workers=number).shuffle(10).batch(8, True).repeat(2)

    whole = list(make(None))
    for taken in (1, 5, len(whole) - 1):
        data = make(4)
        rows = iter(data)
        assert same([next(rows) for _ in range(taken)], whole[:taken])
        state = data.state_dict()
        rows.close()
        resumed = make(3)
        resumed.load_state_dict(state)
        assert same(list(resumed), whole[taken:])


class Busy:
    """A function that records how many threads call it at once, and the order in which it gets the rows.

    wanted: a call waits until so many threads have been in the function at the same time, but at most 60 s.
    """

    def __init__(self, wanted: int) -> None:
        self.news = threading.Condition()
        self.wanted = wanted
        self.inside = self.most = 0
        self.order: list[int] = []

    def __call__(self, x: Any) -> Any:
        with self.news:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.order.append(int(x))
            self.news.notify_all()
            self.news.wait_for(lambda: self.most >= self.wanted, 60)
        time.sleep(0.002)  # time for another thread to come in too, where that would be wrong
        with self.news:
            self.inside -= 1
        return x


def test_a_function_of_the_program_is_called_by_so_many_threads_as_its_step_allows(four_cpus):
    busy, alone = Busy(wanted=2), Busy(wanted=1)
    data = ordered(40).map(alone).map(busy, num_parallel_workers=4)
    assert given_by(data) == list(range(40))
    assert busy.most > 1
    assert alone.most == 1 and alone.order == list(range(40))  # no two threads were in `alone` at the same time
    alone = Busy(wanted=1)
    assert given_by(ordered(24).map(alone).batch(2).batch(3, num_parallel_workers=4)) == [
        [[i, i + 1] for i in range(begin, begin + 6, 2)] for begin in range(0, 24, 6)
    ]
    assert alone.most == 1 and alone.order == list(range(24))


def test_a_source_is_read_by_one_thread_unless_it_allows_more(four_cpus):
    for number, most in ((None, 1), (1, 1), (3, 3)):
        busy = Busy(wanted=most)

        class Source:
            def __getitem__(self, index: int, busy: Busy = busy) -> Any:
                return (busy(index),)

            def __len__(self) -> int:
                return 40

        data = ds.GeneratorDataset(Source(), "x", shuffle=False, num_parallel_workers=number)
        assert given_by(data.map(np.negative, num_parallel_workers=4)) == [-i for i in range(40)]
        assert busy.most == most and (most > 1 or busy.order == list(range(40)))


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_in_a_thread_comes_in_its_place_with_the_row(ahead, four_cpus, no_thread_before):
    ds.config.set_prefetch_size(ahead)
    data = ordered(40).map([abs, fails_at_5], num_parallel_workers=4).batch(2)
    rows = iter(data)
    assert next(rows)[0].tolist() == [0, 1] and next(rows)[0].tolist() == [2, 3]
    with pytest.raises(RuntimeError, match=r"map of x: fails_at_5 \(2 of 2\) on row 5 of the source: KeyError"):
        next(rows)
    assert none_is_left()


def test_threads_end_with_an_iterator_that_is_dropped(four_cpus, no_thread_before):
    for ahead in (0, 2):
        ds.config.set_prefetch_size(ahead)
        rows = iter(ordered(5).map(np.negative, num_parallel_workers=4).repeat())
        next(rows)
        assert fillers()
        del rows
        gc.collect()
        assert none_is_left()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_process_with_threads_ends_well_and_a_forked_child_is_told(ahead):
    program = f"""
import os, signal, warnings
warnings.simplefilter("ignore", DeprecationWarning)
os.cpu_count = lambda: 4
import mscomm.dataset as ds
ds.config.set_prefetch_size({ahead})
rows = iter(ds.GeneratorDataset([(i,) for i in range(999)], "x").map(lambda x: x, num_parallel_workers=4).repeat())
next(rows)
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        while True:
            next(rows)
    except RuntimeError as error:
        os._exit(7 if "create a new one here" in str(error) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
next(rows)
"""
    done = run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_function_gets_arrays_in_c_order(folder):
    data = ds.Cifar10Dataset(folder).map([vision.RandomHorizontalFlip(1.0), lambda image: image.flags.c_contiguous])
    assert all(contiguous for contiguous, _ in data)


def test_a_batch_is_no_window_on_the_programs_own_arrays():
    mine = np.zeros((2, 2, 1), np.uint8)
    for step in (ds.Dataset.batch, lambda data, n: data.map(vision.Resize(2)).batch(n)):
        (batch,) = next(iter(step(ds.GeneratorDataset([(mine,)], "x"), 1)))
        batch += 1
    assert not mine.any()
