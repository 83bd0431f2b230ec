"""Which items of `mpwatch.map` are tried again, and when."""

import re
import time

import mpwatch
from mpwatch import RestartPolicy


def fail_with(number):
    raise (FileNotFoundError if number == 0 else ValueError)("bad")


def note_and_fail_at_zero(path, number):
    with open(path, "a") as file:
        file.write(f"{number} {time.monotonic()}\n")
    if number == 0:
        raise ValueError("zero")


def test_retry_if_decides_for_each_item():
    policy = RestartPolicy(1, retry_if=OSError)
    first, second = mpwatch.map(fail_with, range(2), 1, on_error="yield", max_restarts=policy)
    assert [first.attempts, second.attempts] == [2, 1]
    assert str(first).endswith("(2 attempts); all restarts are used up (max_restarts=1)")
    assert re.search("`retry_if` does not allow a restart", str(second))


def test_other_items_go_on_while_one_waits_for_its_delay(tmp_path):
    path, policy = tmp_path / "calls", RestartPolicy(1, delay=0.5, jitter=0.0)
    items = range(5)
    list(mpwatch.map(lambda number: note_and_fail_at_zero(path, number), items, 1, on_error="yield", max_restarts=policy))
    calls = [line.split() for line in path.read_text().splitlines()]
    assert [int(number) for number, _ in calls] == [*items, 0]
    assert float(calls[-1][1]) >= float(calls[0][1]) + 0.5
