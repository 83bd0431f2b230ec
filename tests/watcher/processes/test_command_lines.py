"""What `ps` shows of the ranks and of the guardian."""

import os
from pathlib import Path

import mpwatch
from support.process_state import children


def read_command_line(pid="self"):
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]


def test_the_command_line_of_a_rank_says_which_rank_of_which_run_it_is():
    result = mpwatch.run(read_command_line, 2)
    run_id = result.workers[0].run_id[:8]
    for rank, command in enumerate(result):
        assert command[-5:] == [
            "--multiprocessing-fork",
            "mpwatch",
            f"rank={rank}/2",
            "fn=read_command_line",
            f"run={run_id}",
        ]


def test_the_ranks_of_a_group_have_no_function_of_their_own():
    with mpwatch.WorkerGroup(1) as group:
        (command,) = group.run(read_command_line)
        assert command[-3:] == ["mpwatch", "rank=0/1", f"run={group.workers[0].run_id[:8]}"]


def test_the_command_line_of_the_guardian_says_whose_it_is():
    with mpwatch.WorkerGroup(1) as group:
        group.run(read_command_line)
        (guardian,) = (command for pid in children() if "guardian" in (command := read_command_line(pid)))
    assert guardian[-3:] == ["mpwatch", "guardian", f"of={os.getpid()}"]


def test_a_name_that_no_command_line_can_hold():
    def fn():
        return read_command_line()[-2]

    fn.__qualname__ = "tr\0\N{LATIN SMALL LETTER A WITH DIAERESIS}\ud800in\x1b[2J" + "x" * 100
    (name,) = mpwatch.run(fn, 1)
    assert name == "fn=tr???in?[2J" + "x" * 69
