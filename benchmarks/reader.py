"""Read what ranks print as fast as it arrives, time that, then check it. Print the figures as a line of JSON.

python reader.py RANKS LINES

A line is correct if it has the prefix of its rank, is complete, and is the next one of that rank. The reader first stores
everything, in memory that it has allocated before. To check lines meanwhile would take CPU time from the measured processes.
"""

import json
import os
import sys
import time

import tasks

READ_SIZE = 1 << 20
PAGE = 4096
BYTES_PER_LINE = 2 * tasks.LINE  # room for a line with its prefix, or for one that is shown twice
END_MARK = b"\0end of output\0"  # written in one call, so read in one; torch elastic also shows zero bytes


def main(ranks, lines):
    memory = memoryview(bytearray(BYTES_PER_LINE * ranks * lines))
    # the kernel allocates a page at the first write: now, not while it is measured
    memory[::PAGE] = bytes(len(memory[::PAGE]))
    size, instants = 0, []
    while count := os.readv(0, [memory[size : size + READ_SIZE]]):
        size += count
        instants.append(time.monotonic())
        if memory[size - len(END_MARK) : size] == END_MARK:
            size -= len(END_MARK)
            break
    print(
        json.dumps(
            {"shown": instants[-1] - instants[0], "wrong_lines": count_wrong_lines(bytes(memory[:size]), ranks, lines)}
        )
    )


def count_wrong_lines(output, ranks, lines):
    """Count the lines that are not a line of a rank or not its next one, and the lines that are missing or too many."""
    places = {
        f"[{rank}] {line}".encode(): (rank, number)
        for rank in range(ranks)
        for number, line in enumerate(tasks.make_lines(rank))
    }
    next_numbers, correct, wrong = [0] * ranks, 0, 0
    for line in output.removesuffix(b"\n").split(b"\n"):
        rank, number = places.get(line, (None, None))
        if rank is None or number != next_numbers[rank]:
            wrong += 1
        else:
            correct += 1
        if rank is not None:
            next_numbers[rank] = (number + 1) % tasks.LINES_PER_BLOCK
    return wrong + abs(ranks * lines - correct - wrong)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
