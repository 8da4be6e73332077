"""The steps of a pipeline: shuffle, batch, repeat and map; and the iterators over its columns."""

from __future__ import annotations

import itertools
import traceback
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import numbers
from pipelines import fails_at_5, given_by, ordered

import mscomm.dataset as ds
from mscomm.dataset import vision


@given(rows=st.integers(0, 60), size=st.integers(2, 70))
@settings(max_examples=60, deadline=None)
def test_shuffle_takes_each_row_from_the_next_buffer_size_ones(rows, size):
    ds.config.set_prefetch_size(0)
    got = given_by(ordered(rows).shuffle(size))
    assert sorted(got) == list(range(rows))
    left = list(range(rows))
    for row in got:
        assert row in left[:size]
        left.remove(row)


def test_shuffle_leaves_no_row_its_place():
    data = ordered(6).shuffle(6)
    firsts = [given_by(data)[0] for _ in range(60)]
    assert set(firsts) == set(range(6))


@given(rows=st.integers(0, 40), size=st.integers(1, 12), drop=st.booleans(), times=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_batch_and_repeat_give_the_rows_in_order_and_the_size_that_they_say(rows, size, drop, times):
    ds.config.set_prefetch_size(0)
    whole = list(range(rows))
    batches = [whole[at : at + size] for at in range(0, rows, size)]
    if drop:
        batches = [batch for batch in batches if len(batch) == size]
    data = ordered(rows).batch(size, drop).repeat(times)
    assert given_by(data) == batches * times
    assert (data.get_dataset_size(), data.get_batch_size(), data.get_repeat_count()) == (
        len(batches) * times,
        size,
        times,
    )


def test_repeat_before_batch_fills_batches_over_the_seam():
    assert given_by(ordered(3).repeat(2).batch(4)) == [[0, 1, 2, 0], [1, 2]]


def test_the_rounds_of_repeat_are_passes_of_their_own():
    data = ds.GeneratorDataset(numbers(20), "x")
    passes = [given_by(data) for _ in range(6)]
    again = ds.GeneratorDataset(numbers(20), "x").repeat(3)
    assert [given_by(again) for _ in range(2)] == [[*itertools.chain(*passes[at : at + 3])] for at in (0, 3)]


@pytest.mark.parametrize("count", [None, -1])
def test_repeat_without_end(count):
    data = ordered(3).repeat(count)
    rows = iter(data)
    assert [next(rows)[0].item() for _ in range(10)] == [0, 1, 2] * 3 + [0]
    assert (data.get_repeat_count(), data.get_dataset_size()) == (-1, 3)
    rows.close()
    assert list(ordered(0).repeat(count)) == []


def test_batches_are_in_c_order_and_writable(folder):
    data = ds.Cifar10Dataset(folder).map(vision.HWC2CHW(), "image").batch(8)
    image, label = next(iter(data))
    assert image.flags.c_contiguous and image.flags.writeable and label.flags.writeable


@pytest.mark.parametrize(
    "operation", [vision.RandomHorizontalFlip(1.0), vision.HWC2CHW(), vision.RandomCrop(8)], ids=repr
)
def test_rows_are_in_c_order_with_and_without_batch(folder, operation):
    data = ds.Cifar10Dataset(folder)
    for changed in (data.map(operation, "image"), data.batch(4).map(vision.HWC2CHW(), "image")):
        assert next(iter(changed))[0].flags.c_contiguous


def test_rows_that_do_not_fit_in_a_batch_are_named():
    data = ds.GeneratorDataset([(np.zeros(2),), (np.zeros(3),)], "x", shuffle=False).batch(2)
    with pytest.raises(
        RuntimeError, match=r"column x is float64\[3\] in row 1 of the source and float64\[2\] in row 0"
    ):
        next(iter(data))


def test_text_of_any_length_is_batched():
    assert given_by(ds.GeneratorDataset([("a",), ("long",)], "x", shuffle=False).batch(2)) == [["a", "long"]]


def test_map_changes_the_columns_that_it_is_told_to():
    data = ds.GeneratorDataset([(1, 2, 3)], ["a", "b", "c"])
    add = data.map(lambda a, c: (a + c, a * c), ["a", "c"])
    assert next(add.create_dict_iterator()) == {"a": 4, "b": 2, "c": 3}
    first = data.map([lambda a: a + 1, lambda a: a * 10])
    assert next(first.create_dict_iterator()) == {"a": 20, "b": 2, "c": 3}
    renamed = data.map(lambda b: -b, "b", "minus")
    assert renamed.get_col_names() == ["a", "minus", "c"] and next(iter(renamed)) == (1, -2, 3)
    split = data.map(lambda a: (a, a + 7), "a", ["low", "high"])
    assert split.get_col_names() == ["low", "high", "b", "c"] and next(iter(split)) == (1, 8, 2, 3)
    joined = data.map(lambda a, b: a + b, ["a", "b"], "sum")
    assert joined.get_col_names() == ["sum", "c"] and next(iter(joined)) == (3, 3)
    assert data.get_col_names() == ["a", "b", "c"]  # data itself is unchanged


@pytest.mark.parametrize(
    ("step", "arguments", "kind", "said"),
    [
        ("map", ([],), ValueError, "operations is empty"),
        ("map", (3,), TypeError, "3 is not callable"),
        ("map", (abs, "y"), ValueError, "there is no column 'y'; there are x"),
        ("map", (abs, 3), TypeError, "'int' object is not iterable"),
        ("map", (abs, ["x", "x"]), ValueError, "a name twice"),
        ("map", (abs, "x", []), TypeError, "output_columns"),
        ("shuffle", (1,), ValueError, "buffer_size=1; expected 2 or more"),
        ("shuffle", (2.0,), TypeError, "buffer_size is a float"),
        ("batch", (0,), ValueError, "batch_size=0; expected 1 or more"),
        ("batch", (True,), TypeError, "batch_size is a bool"),
        ("batch", (2, 1), TypeError, "drop_remainder is a int"),
        ("repeat", (0,), ValueError, "count=0; expected 1 or more"),
        ("repeat", ("2",), TypeError, "count is a str"),
        ("create_dict_iterator", (0,), ValueError, "num_epochs=0"),
        ("create_tuple_iterator", (["y"],), ValueError, "there is no column 'y'; there are x"),
        ("create_tuple_iterator", (None, "1"), TypeError, "num_epochs is a str"),
    ],
)
def test_a_step_refuses_what_makes_no_sense(step, arguments, kind, said):
    with pytest.raises(kind, match=said):
        getattr(ordered(3), step)(*arguments)


def test_a_number_of_results_that_does_not_fit_is_told():
    with pytest.raises(RuntimeError, match=r"map of x: <lambda> on row 0 .*returned 2 values for 1 columns"):
        next(iter(ordered(3).map(lambda x: (x, x))))


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_an_operation_raises_comes_with_its_name_the_row_and_the_place(ahead):
    ds.config.set_prefetch_size(ahead)
    data = ds.GeneratorDataset(numbers(10), "x", shuffle=False).map([abs, fails_at_5]).batch(2)
    rows = iter(data)
    assert next(rows)[0].tolist() == [0, 1] and next(rows)[0].tolist() == [2, 3]
    with pytest.raises(
        RuntimeError, match=r"map of x: fails_at_5 \(2 of 2\) on row 5 of the source: KeyError"
    ) as raised:
        next(rows)
    assert "fails_at_5" in "".join(traceback.format_tb(raised.value.__cause__.__traceback__))
    assert data.state_dict()["batch"] == 2
    with pytest.raises(StopIteration):
        next(rows)


def test_what_an_operation_on_batches_raises_names_the_batch():
    with pytest.raises(
        RuntimeError, match="<lambda> on the batch that begins with row 4 of the source: ZeroDivisionError"
    ):
        list(ordered(6).batch(2).map(lambda x: 1 // int(x[0] != 4)))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_comes_as_it_is(kind):
    def leave(x: Any) -> Any:
        raise kind

    with pytest.raises(kind):
        list(ordered(3).map(leave))


def test_a_tuple_iterator_gives_the_columns_that_it_is_asked_for():
    data = ds.GeneratorDataset([(1, 2, 3)], ["a", "b", "c"])
    assert next(data.create_tuple_iterator(["c", "a"])) == (3, 1)


def test_an_iterator_gives_as_many_passes_as_it_was_made_for():
    rows = ds.GeneratorDataset(numbers(20), "x").create_tuple_iterator(num_epochs=2)
    first, second, third = ([row[0].item() for row in rows] for _ in range(3))
    assert sorted(first) == sorted(second) == list(range(20)) and first != second and third == []


def test_an_iterator_goes_on_after_a_break():
    rows = ordered(5).create_tuple_iterator()
    for row in rows:
        if row[0] == 2:
            break
    assert [row[0].item() for row in rows] == [3, 4]
    rows.close()
