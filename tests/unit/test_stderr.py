"""Standard error keeps nobody waiting and raises at nobody, whatever happens to its reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raftmeta.stderr import MAX_QUEUED_BYTES, QueuedStderr

LINE = "x" * 999 + "\n"
TOO_MANY = 4 * MAX_QUEUED_BYTES // len(LINE)  # more than the queue, what is under way and a pipe take


@contextmanager
def pipe() -> Iterator[tuple[int, QueuedStderr]]:
    reader, writer = os.pipe()
    output = QueuedStderr(writer)
    yield reader, output
    output.finish()
    os.close(writer)


def read_to_the_end(reader: int, output: QueuedStderr) -> list[str]:
    """Every line up to the first `last` that found room."""
    found = [b""]

    def read() -> None:
        while not found[-1].endswith(b"last\n"):
            found.append(os.read(reader, 65_536))

    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():
        output.write("last\n")
        thread.join(0.01)
    os.close(reader)
    return b"".join(found).decode().splitlines()


def test_a_reader_that_reads_no_more_keeps_nobody_waiting_and_is_told_later_what_it_missed() -> None:
    with pipe() as (reader, output):
        writer = threading.Thread(target=lambda: [output.write(LINE) for _ in range(TOO_MANY)], daemon=True)
        writer.start()
        writer.join(10)
        assert not writer.is_alive()
        lost = output.lost_lines
        assert 0 < lost < TOO_MANY
        lines = read_to_the_end(reader, output)
    notices = [json.loads(line) for line in lines if line.startswith("{")]
    assert {notice["event"] for notice in notices} == {"log_lines_lost"}
    assert sum(notice["lines"] for notice in notices) >= lost
    assert sum(line + "\n" == LINE for line in lines) == TOO_MANY - lost


def test_lines_for_a_reader_that_is_gone_are_counted_and_raise_nothing() -> None:
    with pipe() as (reader, output):
        os.close(reader)
        for _ in range(3):
            output.write(LINE)
        output.finish()
        assert output.lost_lines == 3


def test_a_line_that_a_full_disk_cuts_is_ended_before_the_next_one() -> None:
    written: list[bytes] = []
    room = [4]  # bytes until the disk is full

    def write(_: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = min(len(data), room[0])
        room[0] -= taken
        written.append(bytes(data[:taken]))
        return taken

    output = QueuedStderr(2, write)
    output.write("first line\n")
    while output.lost_lines == 0:
        threading.Event().wait(0.001)
    room[0] = 10_000
    output.write("second line\n")
    output.finish()
    cut, notice, second = b"".join(written).decode().splitlines()
    assert (cut, json.loads(notice)["lines"], second) == ("firs", 1, "second line")


def test_a_full_device_raises_nothing() -> None:
    with Path("/dev/full").open("wb") as full:
        output = QueuedStderr(full.fileno())
        output.write(LINE)
        output.finish()
        assert output.lost_lines == 1


def test_a_pipe_that_somebody_made_non_blocking_loses_no_line() -> None:
    with pipe() as (reader, output):
        os.set_blocking(output.fileno(), False)
        for number in range(500):
            output.write(f"{number} {LINE}")
        lines = read_to_the_end(reader, output)
    assert [line.split()[0] for line in lines if line != "last"] == [*map(str, range(500))]


@pytest.mark.parametrize("ending", ["raise ValueError('the end')", "sys.exit('the end')", "sys.stderr.write('the end\\n')"])
def test_the_last_words_of_a_process_are_written(ending: str) -> None:
    code = f"import sys; from raftmeta import stderr; stderr.install(); {ending}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1].endswith("the end")


def test_a_process_whose_reader_hangs_ends_all_the_same() -> None:
    code = f"from raftmeta import stderr; made = stderr.install(); [made.write({LINE!r}) for _ in range({TOO_MANY})]"
    reader, writer = os.pipe()
    try:
        assert subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=60, check=False).returncode == 0
    finally:
        os.close(reader)
        os.close(writer)


def test_a_process_that_was_started_without_standard_error_says_nothing_and_writes_into_no_file(tmp_path: Path) -> None:
    """Its first file may get the number of standard error."""
    file = tmp_path / "data"
    code = f"from raftmeta import stderr; made = stderr.install(); file = open({str(file)!r}, 'w'); made.write('a line\\n'); made.finish()"
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], timeout=60, check=False)
    assert (done.returncode, file.read_bytes()) == (0, b"")
