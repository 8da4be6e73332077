"""The plan of a job: which worker gets which rank, which ranks share a host, and whether all ranks agree."""

from __future__ import annotations

import itertools

import pytest

from mscomm import errors
from mscomm.cluster import plan


def arrivals(*members):
    """Return the arrivals of workers, each given by its id and the address of its host."""
    return [plan.Arrival(node_id, host, host, f"id of {host}") for node_id, host in members]


def test_ids_that_are_all_numbers_are_ranks():
    assert plan.assign_ranks(arrivals(("2", "h"), ("0", "h"), ("1", "h"))) == [2, 0, 1]


@pytest.mark.parametrize("ids", [("0", "0"), ("0", "2")])
def test_numbers_that_make_no_job_are_refused(ids):
    with pytest.raises(ValueError, match="MS_NODE_ID="):
        plan.assign_ranks(arrivals(*((i, "h") for i in ids)))


def test_an_id_of_thousands_of_digits_is_only_a_name():
    assert plan.assign_ranks(arrivals(("9" * 5000, "h"), ("1", "h"))) == [1, 0]


def test_hosts_are_contiguous_and_ids_sort_as_people_count():
    members = [("worker_10", "b"), (None, "a"), ("worker_2", "b"), (None, "a"), ("worker_1", "a")]
    assert plan.assign_ranks(arrivals(*members)) == [4, 1, 3, 2, 0]


def test_the_order_of_registration_does_not_change_the_ranks_of_workers_with_ids():
    members = [("worker", ""), ("a", "10.0.0.2"), ("b", "10.0.0.2"), ("a", "10.0.0.10")]  # "": the scheduler's host
    for order in itertools.permutations(members):
        ranks = plan.assign_ranks(arrivals(*order))
        assert [member for _, member in sorted(zip(ranks, order, strict=True))] == members


def test_a_host_with_two_addresses_is_one_host():
    first = [plan.Arrival("2", "10.0.0.9", "h", "x"), plan.Arrival("w", "10.0.0.5", "i", "y")]
    members = [*first, plan.Arrival("1", "10.0.0.1", "h", "x")]
    assert plan.assign_ranks(members) == [1, 2, 0]
    assert plan.assign_ranks(members[::-1]) == [0, 2, 1]


def test_hosts_are_numbered_by_their_lowest_rank():
    assert plan.hosts([{"host": h} for h in "zaza"]) == [0, 1, 0, 1]


def test_agree_names_the_ranks_that_differ():
    facts = [{"version": "1", "size": 3, "backend": b, "algo": ""} for b in ("cpu", "cpu", "nccl")]
    with pytest.raises(errors.Mismatch, match="rank 2: 'nccl'") as caught:
        plan.agree(facts)
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("name", ["world", "pair", "a:b", "1:c:0123456789abcdef:2"])
def test_the_id_of_a_group_contains_its_name(name):
    assert plan.group_name(plan.group_id(3, name, [0, 2], 1)) == name
