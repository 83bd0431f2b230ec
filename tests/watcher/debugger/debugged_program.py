"""A program for a terminal: it runs a function whose ranks come to breakpoints. `python debugged_program.py FUNCTION RANKS OPTIONS`."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import mpwatch
from support.functions import rank


def loop(ranks):
    values = {"rank": rank()}
    for step in range(3):
        if rank() in ranks and step == 1:
            breakpoint()
        values["step"] = step
    return values["step"]


def print_lines(ranks):
    for number in range(20):
        print(f"line {number} of rank {rank()}")
        mpwatch.report(step=number, total=20)
        if rank() in ranks and number == 10:
            breakpoint()
    return number


def stop_elsewhere(_):
    if rank() == 0:
        thread = threading.Thread(target=loop, args=([0],), name="worker")
        thread.start()
        thread.join()
        return "joined"
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            breakpoint()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    return os.read(reader, 1000).decode()


def fail_while_others_stop(ranks):
    if rank() in ranks:
        breakpoint()
    while not os.path.exists(os.environ["GATE"]):
        os.sched_yield()
    raise ValueError("of another rank")


def raise_in_one(ranks):
    secret = f"secret of rank {rank()}"
    if rank() in ranks:
        raise ValueError(secret)
    wait_for_peer()


def wait_for_peer():
    threading.Event().wait()


def stop_once(_=None):
    breakpoint()
    return 1


def wait_for_event(barrier, event):
    barrier.wait()
    event.wait()


def call_group():
    spawn = multiprocessing.get_context("spawn")
    barrier, event = spawn.Barrier(2), spawn.Event()
    with mpwatch.WorkerGroup(2) as group:
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(group.run, stop_once).exception()
        print(f"from a thread: {error.__cause__}", flush=True)
        waiting = group.submit(wait_for_event, (barrier, event), ranks=1)
        barrier.wait()
        for _ in range(2):
            print(f"values: {list(group.run(stop_once, ranks=0).values())}", flush=True)
        event.set()
        waiting.result()
        with suppress(KeyboardInterrupt):
            group.run(stop_once)
        print(f"after the quit: {list(group.run(stop_once, ranks=0).values())}", flush=True)


def main(name, ranks, options):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run with this signal ignored
    options = json.loads(options)
    if options.pop("handles_sigterm", False):
        signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM has come"))
    if options.pop("logs", False):
        options["logs"] = mpwatch.LogSpec(prefix="<{rank}> ")
    function, ranks = globals()[name], json.loads(ranks)
    if ranks is None:
        function()
        return
    try:
        print(f"values: {list(mpwatch.run(function, args=(ranks,), **{'nprocs': 2, **options}))}", flush=True)
    except KeyboardInterrupt as error:
        print(f"KeyboardInterrupt: {error}")
    except mpwatch.RunFailedError as error:
        print(f"failed: {error}")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    left = [child for child in children if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]
    print(f"children that are left: {left}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
