"""The thread that writes a log, so that nobody waits for the reader of the log."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest

from mscomm.writing import LogLines, Output

LINE = "x" * 1000


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    with open(reader, "rb") as source, open(writer, "w") as target:
        yield source, target


def test_the_lines_come_in_order(pipe):
    source, target = pipe
    log = LogLines(target, "head: ")
    for number in range(1000):
        log.add(str(number))
        if number == 0:
            assert source.readline() == b"head: 0\n"  # without a further line, and without close()
    target_lines = [source.readline() for _ in range(999)]
    assert target_lines == [b"head: %d\n" % number for number in range(1, 1000)]
    assert log.close(10)


def test_lines_that_nobody_reads_are_dropped_counted_and_told_of(pipe):
    source, target = pipe
    log = LogLines(target, "")
    total = 3000  # 3 MB, of which the log holds one
    for number in range(total):
        log.add(f"{number} {LINE}")
    assert log.flush(0.2) > 0  # the reader has taken nothing
    lines, missing = [], 0
    while len(lines) + missing < total:
        line = source.readline().decode()
        if told := re.match(r"(\d+) lines are missing here, because nobody read this output$", line):
            missing += int(told[1])
        else:
            lines.append(int(line.split()[0]))
    log.add("the next line")
    assert source.readline() == b"the next line\n"
    assert lines == sorted(lines) and 1000 < len(lines) < 1500
    assert log.close(10)


def test_flushing_the_stream_does_not_wait_for_its_reader(pipe):
    source, target = pipe
    log = LogLines(target, "")
    for _ in range(200):
        log.add(LINE)
    assert log.flush(0.2) > 0  # the thread waits for room in the pipe
    target.flush()
    os.read(source.fileno(), 1 << 20)


@pytest.mark.parametrize("closed", ["closed", "absent", "unread"])
def test_a_stream_that_is_gone_is_no_error(closed):
    reader, writer = os.pipe()
    os.close(reader)
    stream = open(writer, "w")  # noqa: SIM115
    if closed == "closed":
        stream.close()
    log = LogLines(None if closed == "absent" else stream, "")
    for _ in range(10):
        log.add(LINE)
    assert log.close(10)
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_data_that_a_full_disk_does_not_take_is_dropped_and_counted(tmp_path):
    full, waked = tmp_path / "full", []
    full.symlink_to("/dev/full")
    fd = os.open(full, os.O_WRONLY)
    output = Output(fd, lambda: waked.append(1))
    for _ in range(2):
        output.write(LINE.encode())
        assert output.flush(60) == 0
    assert (output.broken, output.dropped, output.why) == (False, 2 * len(LINE), "No space left on device")
    os.dup2(os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT), fd)  # now there is room
    output.write(b"more")
    assert output.flush(60) == 0
    assert (tmp_path / "file").read_bytes() == b"more" and output.dropped == 2 * len(LINE)
    assert output.close(60) and len(waked) == 1
    os.close(fd)


def test_a_stream_without_a_descriptor_gets_the_lines():
    stream = io.StringIO()
    log = LogLines(stream, "head: ")
    log.add("ä \udcff")
    assert log.close(10)
    assert stream.getvalue() == "head: ä \\udcff\n"
