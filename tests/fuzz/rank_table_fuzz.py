"""Rank tables: JSON files that a user or a cluster writes."""

from fuzzing import instrumented, run

with instrumented():
    from mscomm.bootstrap.rank_table_file import InvalidTable, Server, make, parse, unfit_for_910


def fuzz(data: bytes) -> None:
    try:
        table = parse(data, "table.json")
    except InvalidTable as error:
        str(error).encode()  # a user sees this text
        return
    assert [seat.rank for seat in table.seats] == list(range(len(table.seats)))
    unfit_for_910(table.seats)
    list(map(str, table.remarks))


def seeds():
    one = make([Server("10.0.0.1", [0, 1], {0: "192.168.0.1", 1: "192.168.0.2"})])
    yield one.encode()
    yield make([Server("10.0.0.1", [0]), Server("node2", [3])]).encode()
    yield one.replace('"1.0"', '"1.2"').replace('"status"', _POD + '"status"').encode("utf-8-sig")
    yield b'{"group_list": [], "x": [1e999, -0, "\\ud800", NaN], "x": 1}'


_POD = '"super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "10.0.0.1"}]}], '

if __name__ == "__main__":
    run(fuzz, seeds())
