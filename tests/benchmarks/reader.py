"""Reads what ranks print as fast as it comes, times it, then looks at it. The figures are a line of JSON.

python reader.py RANKS LINES

A line is right if it has its rank's prefix, is whole, and is the next one of that rank. What comes is kept until all is in,
in memory that is there before: to look at it meanwhile would take CPU time from those that are measured.
"""

import json
import os
import sys
import time

import tasks

AT_ONCE = 1 << 20
PAGE = 4096
ROOM = 2 * tasks.LINE  # bytes for a line, with its prefix, or shown twice
END = b"\0no more comes\0"  # written at once, so read at once; torch elastic shows bytes, zeros too, that nobody printed


def main(ranks, lines):
    room = memoryview(bytearray(ROOM * ranks * lines))
    room[::PAGE] = bytes(len(room[::PAGE]))  # the kernel gives a page when it is first written to: now, and not meanwhile
    size, instants = 0, []
    while got := os.readv(0, [room[size : size + AT_ONCE]]):
        size += got
        instants.append(time.monotonic())
        if room[size - len(END) : size] == END:
            size -= len(END)
            break
    print(json.dumps({"shown": instants[-1] - instants[0], "faults": faults_of(bytes(room[:size]), ranks, lines)}))


def faults_of(said, ranks, lines):
    """How many lines are no line, or not the next one of their rank, or too few or too many in all."""
    places = {
        f"[{rank}] {line}".encode(): (rank, number)
        for rank in range(ranks)
        for number, line in enumerate(tasks.lines_of(rank))
    }
    due, right, wrong = [0] * ranks, 0, 0
    for line in said.removesuffix(b"\n").split(b"\n"):
        rank, number = places.get(line, (None, None))
        if rank is None or number != due[rank]:
            wrong += 1
        else:
            right += 1
        if rank is not None:
            due[rank] = (number + 1) % tasks.CYCLE
    return wrong + abs(ranks * lines - right - wrong)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
