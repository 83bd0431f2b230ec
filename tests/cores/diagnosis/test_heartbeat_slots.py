"""The shared memory in which a rank leaves its heartbeats and reports: a half-written report is no report."""

import os
from tempfile import TemporaryFile

import pytest

from mpwatch.wire.shared_memory import HEARTBEAT_AT, MAX_REPORT_SIZE, REPORT_AT, SLOT_SIZE, RankSlot, Slot


@pytest.mark.parametrize(("text", "at"), [(b"x", REPORT_AT + 4), (b"\xff" * MAX_REPORT_SIZE, HEARTBEAT_AT)])
def test_a_report_that_is_half_written_or_overwritten_is_ignored(text, at):
    with TemporaryFile(buffering=0) as memory:
        memory.truncate(SLOT_SIZE)
        slot = Slot(memory.fileno(), 0)
        RankSlot(os.dup(memory.fileno()), 0).write_report(3, 4, {"loss": 0.1})
        assert slot.read_heartbeat().report.step == 3
        os.pwrite(memory.fileno(), text, at)
        assert slot.read_heartbeat().report is None
