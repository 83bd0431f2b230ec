"""The shared memory in which a rank leaves its heartbeats and reports: a half-written report is no report."""

import os
from tempfile import TemporaryFile

import pytest

from mpwatch.wire.shared_memory import HEARTBEAT_AT, MAX_REPORT_SIZE, REPORT_AT, SLOT_SIZE, RankSlot, Slot


@pytest.fixture
def memory():
    with TemporaryFile(buffering=0) as file:
        file.truncate(2 * SLOT_SIZE)
        yield file.fileno()


def test_a_slot_has_the_last_heartbeat_and_the_last_report(memory):
    rank_1 = RankSlot(os.dup(memory), 1)
    assert Slot(memory, 1).read_heartbeat().beat_at is None
    rank_1.write_report(3, None, {"loss": 0.1})
    rank_1.write_heartbeat()
    last = Slot(memory, 1).read_heartbeat()
    report = last.report
    assert (report.step, report.total, report.metrics) == (3, None, {"loss": 0.1})
    assert report.at <= last.beat_at
    other = Slot(memory, 0).read_heartbeat()
    assert (other.beat_at, other.report) == (None, None)


@pytest.mark.parametrize(("text", "at"), [(b"x", REPORT_AT + 4), (b"\xff" * MAX_REPORT_SIZE, HEARTBEAT_AT)])
def test_a_report_that_is_half_written_or_overwritten_is_ignored(memory, text, at):
    RankSlot(os.dup(memory), 0).write_report(3, 4, {"loss": 0.1})
    os.pwrite(memory, text, at)
    assert Slot(memory, 0).read_heartbeat().report is None
