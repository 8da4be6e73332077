"""`mscomm trace`: reads the records of a failed job's ranks (MSCOMM_RECORD), and shows which rank waited for which."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

_TYPES: dict[str, Any] = {"number": int, "call": str, "state": str, "began": (int, float), "took": (int, float)}


class RecordedCall(NamedTuple):
    """One call of one rank, as the recorder wrote it."""

    group: str
    number: int
    call: str  # such as "all_reduce #17 (float32[1024, 3], sum)"
    state: str  # "inside", "done" or "failed"
    began_s: float  # Unix time
    took_s: float  # 0 if the rank was still inside the call
    line: str  # the line of the user's program, such as "train.py:41"; "" if it is not known


class Record(NamedTuple):
    """What one rank recorded, with its calls in all groups. The rank wrote one file for each group that failed."""

    rank: int
    size: int  # the number of ranks in the world; 0 if there is no record of the world group
    cause: str
    calls: list[RecordedCall]


class Late(NamedTuple):
    """One call, the rank that arrived last, and how long the other ranks waited for it."""

    rank: int
    call: RecordedCall
    after_first_s: float
    waited_s: float  # the sum over all other ranks


class _ShowUnlessNamed(click.Group):
    """Makes `trace DIR` mean `trace show DIR`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["show", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[--top N] DIR | merge DIR -o FILE")


_DIR = click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group(
    "trace",
    cls=_ShowUnlessNamed,
    help="""Show which rank waited for which, from the records in DIR. With MSCOMM_RECORD=DIR or `mscomm run --log_dir
DIR`, each rank writes DIR/rank_<rank>.json after a failure. `merge` combines these files into one for Perfetto or
chrome://tracing.""",
)
def command() -> None:
    pass


@command.command("show", hidden=True)
@_DIR
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="The number of calls to list.")
def show(folder: Path, top: int) -> None:
    """Print how the job ended, and the calls in which ranks waited longest."""
    for line in report(_records(folder), top):
        click.echo(line)


@command.command("merge")
@_DIR
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write.",
)
def merge(folder: Path, output: Path) -> None:
    """Write the calls of all ranks to one Chrome trace file, which Perfetto (ui.perfetto.dev) can open."""
    records = _records(folder)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(chrome(records)))
        partial.replace(output)
    except OSError as error:
        raise click.ClickException(f"{output}: {error.strerror}") from error
    calls = sum(len(record.calls) for record in records)
    click.echo(f"{output}: {calls} calls of {len(records)} ranks")


# -- reading the records -----------------------------------------------------------------------------------------------


def _records(folder: Path) -> list[Record]:
    """Return all readable records, in the order of the ranks. Print complaints about unreadable files to stderr."""
    records, complaints = read(folder)
    for complaint in complaints:
        click.echo(f"mscomm trace: {complaint}", err=True)
    if not records:
        raise click.ClickException(
            f"{folder} has no record that can be read. Ranks write rank_<rank>.json there when the job fails, with"
            " MSCOMM_RECORD=DIR or `mscomm run --log_dir DIR`"
        )
    return records


def read(folder: Path) -> tuple[list[Record], list[str]]:
    """Return the records of the folder in the order of the ranks, and complaints about the files that are left out."""
    records: dict[int, Record] = {}
    complaints = []
    # Read shorter names first, so that a rank's record of the world comes before its records of other groups. The
    # combined record keeps the cause of the rank's first record.
    for path in sorted(folder.glob("rank_*.json"), key=lambda path: (len(path.name), path.name)):
        try:
            record = parse(path.read_bytes())
            if not re.fullmatch(rf"rank_{record.rank}\D.*", path.name):
                raise ValueError(f"it says that it is rank {record.rank}'s")
            if first := records.get(record.rank):
                record = first._replace(size=max(first.size, record.size), calls=[*first.calls, *record.calls])
            records[record.rank] = record
        except (OSError, ValueError) as error:
            complaints.append(f"{path}: {error}; it is left out")
    return [records[rank] for rank in sorted(records)], complaints


def parse(data: bytes) -> Record:
    """Parse the bytes of a file, and return the record. Raise a ValueError that says what is wrong with the file."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("not a record: expected an object with rank, size, cause and calls")
    for key, kind in {"rank": int, "size": int, "cause": str, "calls": list}.items():
        if not isinstance(found.get(key), kind):
            raise ValueError(f"not a record: {key!r} is missing or not of type {kind.__name__}")
    size = found["size"] if found.get("group", "world") == "world" else 0
    return Record(found["rank"], size, found["cause"], [_call(entry, found) for entry in found["calls"]])


def _call(entry: Any, record: dict[str, Any]) -> RecordedCall:
    if not isinstance(entry, dict) or any(not isinstance(entry.get(key), kind) for key, kind in _TYPES.items()):
        raise ValueError(
            f"not a record: one of its calls is {entry!r:.100}; expected an object with {', '.join(_TYPES)}"
        )
    group = str(entry.get("group", record.get("group", "world")))
    line = str(entry.get("line", ""))
    return RecordedCall(group, entry["number"], entry["call"], entry["state"], entry["began"], entry["took"], line)


# -- which rank waited for which ---------------------------------------------------------------------------------------


def report(records: list[Record], top: int) -> Iterator[str]:
    """Return the lines that `mscomm trace DIR` prints."""
    size = max(record.size for record in records)
    yield f"{len(records)} of {size or 'an unknown number of'} ranks left a record"
    if missing := sorted(set(range(size)) - {record.rank for record in records}):
        yield f"No record of {_ranks(missing)}: killed, or ended without noticing the failure"
    yield ""
    yield from _end(records)
    late = lateness(records)
    if not late:
        yield "No call has two records to compare"
        return
    yield ""
    yield from _ranking(late)
    yield ""
    longest = sorted(late, key=lambda entry: -entry.waited_s)[:top]
    yield f"The {len(longest)} calls of {len(late)} in which the others waited longest for the last rank:"
    yield "  waited: the sum over the others; after: how long after the first rank the last one came"
    rows = [("waited", "after", "last", "call", "where the last rank was")]
    rows += [
        (_ms(entry.waited_s), _ms(entry.after_first_s), f"rank {entry.rank}", _named(entry.call), entry.call.line)
        for entry in longest
    ]
    yield from _table(rows, right=2)
    yield ""
    yield "Times are those of each host's clock: between hosts they are as good as the clocks."


def _end(records: list[Record]) -> Iterator[str]:
    """Return lines that say why the job ended, what each rank's last call was, and which ranks were behind."""
    by_cause: dict[str, list[int]] = defaultdict(list)
    for record in records:
        by_cause[record.cause].append(record.rank)
    for cause, ranks in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        yield f"Cause ({_ranks(ranks)}): {cause}"
    yield ""
    yield "The last call of each rank:"
    rows = [("rank", "call", "state", "began", "behind", "line")]
    furthest: Counter[str] = Counter()
    for record in records:
        for call in record.calls:
            furthest[call.group] = max(furthest[call.group], call.number)
    for record in records:
        if not record.calls:
            rows.append((str(record.rank), "none", "", "", "", ""))
        last = {call.group: call for call in record.calls}  # later calls replace earlier ones
        for group, call in last.items():
            behind = furthest[group] - call.number
            late = _calls(behind) if behind else ""
            rows.append((str(record.rank), _named(call), call.state, _clock(call.began_s), late, call.line))
    yield from _table(rows, right=0)


def lateness(records: list[Record]) -> list[Late]:
    """Return the rank that arrived last in each call.

    Leave out a call if only one record contains it, or if a rank that has a record of the group did not reach it.
    """
    arrivals: dict[tuple[str, int], list[tuple[float, int, RecordedCall]]] = defaultdict(list)
    # For each group: the highest call number that every rank with a record of the group has reached.
    reached: dict[str, int] = {}
    for record in records:
        for group, number in {call.group: call.number for call in record.calls}.items():
            reached[group] = min(reached.get(group, number), number)
        for call in record.calls:
            arrivals[call.group, call.number].append((call.began_s, record.rank, call))
    late = []
    for (group, number), came in sorted(arrivals.items(), key=lambda item: item[0]):
        if len(came) < 2 or number > reached[group]:
            continue
        began_s, rank, call = max(came, key=lambda arrival: arrival[:2])
        others = [began_s - earlier for earlier, _, _ in came]
        late.append(Late(rank, call, max(others), sum(others)))
    return late


def _ranking(late: list[Late]) -> Iterator[str]:
    """Return lines that say how often each rank arrived last, and how long the others waited for it in total."""
    yield "Who the others waited for, over all calls:"
    times = Counter(entry.rank for entry in late)
    waited_s: dict[int, float] = defaultdict(float)
    for entry in late:
        waited_s[entry.rank] += entry.waited_s
    rows = [("rank", "last in", "waited")]
    rows += [
        (str(rank), f"{times[rank]} of {_calls(len(late))}", _ms(seconds))
        for rank, seconds in sorted(waited_s.items(), key=lambda item: -item[1])
    ]
    yield from _table(rows, right=3)


def chrome(records: list[Record]) -> dict[str, Any]:
    """Return trace events: one process per rank, one thread per group, one event per call.

    The times are in microseconds since the beginning of the first call.
    """
    calls = [call for record in records for call in record.calls]
    start_s = min((call.began_s for call in calls), default=0.0)
    threads = {group: place for place, group in enumerate(sorted({call.group for call in calls}))}
    events: list[dict[str, Any]] = []
    for record in records:
        rank = record.rank
        events.append(_event("M", "process_name", rank, args={"name": f"rank {rank}"}))
        events.append(_event("M", "process_sort_index", rank, args={"sort_index": rank}))
        for group, tid in threads.items():
            events.append(_event("M", "thread_name", rank, tid=tid, args={"name": f"group {group}"}))
        for call in record.calls:
            # A call without an end has the phase B. Viewers draw such a call up to the end of the trace.
            phase, end = ("B", {}) if call.state == "inside" else ("X", {"dur": _us(call.took_s)})
            about = {"call": call.call, "state": call.state, "line": call.line}
            name, began_us, tid = call.call.partition(" ")[0], _us(call.began_s - start_s), threads[call.group]
            events.append(_event(phase, name, rank, cat=call.state, ts=began_us, **end, tid=tid, args=about))
        if record.calls:
            last = max(record.calls, key=lambda call: call.began_s)
            end_us = _us(last.began_s + last.took_s - start_s)
            events.append(_event("i", record.cause, rank, s="p", ts=end_us, tid=threads[last.group]))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_s": start_s}}


def _event(phase: str, name: str, rank: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": rank, **more}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# -- names, times and tables -------------------------------------------------------------------------------------------


def _named(call: RecordedCall) -> str:
    return call.call if call.group == "world" else f"{call.group}: {call.call}"


def _ranks(ranks: Iterable[int]) -> str:
    """Return the ranks as text: rank 3; ranks 0, 2 and 3."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _clock(began_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(began_s)) + f".{int(began_s * 1000) % 1000:03}"


def _table(rows: Sequence[tuple[str, ...]], right: int) -> Iterator[str]:
    """Return the lines of a table, with columns as wide as needed.

    The first `right` columns are aligned to the right.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i < right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
