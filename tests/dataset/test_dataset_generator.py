"""GeneratorDataset: sources with and without random access."""

from __future__ import annotations

from typing import Any

import pytest
from images import numbers
from pipelines import Rows, given_by

import mscomm.dataset as ds


class Again:
    """A source that can be iterated repeatedly, but only in order."""

    def __iter__(self) -> Any:
        return iter([(i, -i) for i in range(5)])


@pytest.mark.parametrize("source", [lambda: iter([(i, -i) for i in range(5)]), Again()], ids=["function", "iterable"])
def test_sources_without_random_access_are_read_in_order_in_each_pass(source):
    data = ds.GeneratorDataset(source, ["x", "y"])
    for _ in range(2):
        assert [(x.item(), y.item()) for x, y in data] == [(i, -i) for i in range(5)]
    assert data.get_dataset_size() == 5
    assert data.batch(2).get_dataset_size() == 3 and data.batch(2, True).repeat(2).get_dataset_size() == 4


def test_random_access_shuffles_unless_told_otherwise():
    assert given_by(ds.GeneratorDataset(numbers(30), "x", shuffle=False)) == list(range(30))
    assert given_by(ds.GeneratorDataset(numbers(30), "x")) != list(range(30))


def test_only_this_ranks_rows_are_read():
    source = Rows(10)
    list(ds.GeneratorDataset(source, ["x", "y"], num_shards=5, shard_id=2, shuffle=False))
    assert source.read == [2, 7]


@pytest.mark.parametrize(
    "options",
    [{"num_shards": 2, "shard_id": 0}, {"shard_id": 0}, {"sampler": [0]}, {"shuffle": True}],
    ids=lambda options: next(iter(options)),
)
def test_what_needs_random_access_is_refused_without(options):
    with pytest.raises(ValueError, match=r"needs a source with __getitem__ and __len__"):
        ds.GeneratorDataset(Again(), ["x", "y"], **options)


def test_what_can_be_read_only_once_is_refused():
    with pytest.raises(ValueError, match="can be read only once; give the function that makes it"):
        ds.GeneratorDataset((i for i in range(3)), "x")


@pytest.mark.parametrize(
    ("source", "names", "kind"),
    [
        (3, "x", TypeError),
        (numbers(3), [], TypeError),
        (numbers(3), 3.5, TypeError),
        (numbers(3), ["x", "x"], ValueError),
    ],
)
def test_a_generator_dataset_refuses_what_makes_no_sense(source, names, kind):
    with pytest.raises(kind):
        ds.GeneratorDataset(source, names)


@pytest.mark.parametrize(
    ("row", "said"),
    [((1, 2), "it has 2 values, there are 1 columns"), ((object(),), "Python objects"), (({},), "Python objects")],
)
def test_a_row_that_is_none_is_named(row, said):
    with pytest.raises(RuntimeError, match=f"row 1 of the source: .*{said}"):
        list(ds.GeneratorDataset([(1,), row], "x", shuffle=False))


def test_what_a_source_raises_comes_with_the_row():
    def generate() -> Any:
        yield (1,)
        raise OSError("disk on fire")

    rows = iter(ds.GeneratorDataset(generate, "x"))
    assert next(rows)[0] == 1
    with pytest.raises(RuntimeError, match="row 1 of the source: OSError: disk on fire") as raised:
        next(rows)
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("source", [numbers(9), lambda: iter(numbers(9))], ids=["random access", "in order"])
def test_num_samples_limits_a_pass(source):
    data = ds.GeneratorDataset(source, "x", num_samples=4)
    assert len(list(data)) == data.get_dataset_size() == 4
