"""Stacks that are asked of a rank while it computes: they are whole, and they do not change what the function sees."""

import os

import mpwatch

NO_STACK = "running; no stack came in time"  # on a machine under load


def work_until(gate):
    class Item:
        def __init__(self, value):
            self.value = value

        def get(self):
            return self.value

    while not os.path.exists(gate):
        sorted(map(Item, range(50)), key=Item.get)
    return "done"


def test_stacks_are_whole_while_functions_begin_and_end(tmp_path, eventually):
    """faulthandler alone would crash the rank here, or write a part of the stack."""
    with mpwatch.submit(work_until, 1, args=(str(tmp_path / "gate"),)) as handle:
        eventually(lambda: " in work_until" in str(handle.stacks()))
        main_threads = [handle.stacks()[0].partition("\n\n")[0] for _ in range(50)]
        whole = [text for text in main_threads if text != NO_STACK]
        assert len(whole) > 10
        assert all(text.splitlines()[-2].endswith(" in work_until") for text in whole), whole
        (tmp_path / "gate").touch()
        assert list(handle.result()) == ["done"]
