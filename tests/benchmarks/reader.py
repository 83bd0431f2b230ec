"""Reads what ranks print as fast as it comes, times it, then looks at it. The figures are a line of JSON.

python reader.py RANKS LINES

A line is right if it has its rank's prefix, is whole, and is the next one of that rank. What comes is kept until all is in:
to look at it meanwhile would take CPU time from those that are measured.
"""

import json
import os
import sys
import time

import tasks

AT_ONCE = 1 << 20
END = b"\0no more comes\0"  # written at once, so read at once; torch elastic shows bytes, zeros too, that nobody printed


def main(ranks, lines):
    chunks, instants = [], []
    while (chunk := os.read(0, AT_ONCE)) and chunk != END:
        chunks.append(chunk.removesuffix(END))
        instants.append(time.monotonic())
        if chunk.endswith(END):
            break
    print(json.dumps({"shown": instants[-1] - instants[0], "faults": faults_of(chunks, ranks, lines)}))


def faults_of(chunks, ranks, lines):
    """How many lines are no line, or not the next one of their rank, or too few or too many in all."""
    places = {
        f"[{rank}] {line}".encode(): (rank, number)
        for rank in range(ranks)
        for number, line in enumerate(tasks.lines_of(rank))
    }
    due, right, wrong = [0] * ranks, 0, 0
    for line in lines_in(chunks):
        rank, number = places.get(line, (None, None))
        if rank is None or number != due[rank]:
            wrong += 1
        else:
            right += 1
        if rank is not None:
            due[rank] = (number + 1) % tasks.CYCLE
    return wrong + abs(ranks * lines - right - wrong)


def lines_in(chunks):
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
