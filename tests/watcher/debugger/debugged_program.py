"""A program for a terminal: it runs a function whose ranks come to breakpoints. `python debugged_program.py FUNCTION OPTIONS`."""

import json
import multiprocessing
import os
import pdb
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mpwatch

SPAWN = multiprocessing.get_context("spawn")


def rank():
    return mpwatch.current_worker().rank


def loop(ranks):
    """Come to a breakpoint in these ranks, at step 1 of 3."""
    values = {"rank": rank()}
    for step in range(3):
        mpwatch.report(step=step, total=3)
        if rank() in ranks and step == 1:
            breakpoint()
        values["step"] = step
    return values["step"]


def print_lines(ranks):
    """Rank 0 comes to a breakpoint; the other ranks print until it goes on."""
    for number in range(20):
        print(f"line {number} of rank {rank()}\n", end="", flush=True)  # in one write: the ranks share the terminal
        if rank() in ranks and number == 10:
            breakpoint()
    return number


def call_set_trace(_):
    pdb.set_trace()
    return 1


def read_terminal(_):
    with open("/dev/tty") as terminal:
        return terminal.readline()


def debug_an_exception(_):
    try:
        return 1 / rank()
    except ZeroDivisionError as error:
        pdb.post_mortem(error.__traceback__)
        return 2


def stop_in_a_thread(_):
    thread = threading.Thread(target=loop, args=([0, 1],), name="worker")
    thread.start()
    thread.join()
    return 1


def stop_in_a_fork(_):
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
        return 1
    time.sleep(1.0)
    raise ValueError("of another rank")


def wait_for_stopped_ranks(ranks):
    if rank() in ranks:
        breakpoint()
    wait_for_peer("")


def loop_without_end(ranks):
    if rank() in ranks:
        breakpoint()
    while True:
        pass


def raise_in_one(ranks):
    secret = f"secret of rank {rank()}"
    if rank() in ranks:
        raise ValueError(secret)
    wait_for_peer(secret)


def raise_one_after_another(ranks):
    mark = Path(tempfile.gettempdir(), os.environ["TORCHELASTIC_RUN_ID"])
    if rank() in ranks:
        mark.touch()
        raise ValueError("the cause")
    while not mark.exists():
        os.sched_yield()
    mark.unlink()
    time.sleep(0.2)  # so that the order is certain
    raise KeyError("the consequence")


def exit_while_another_has_raised(ranks):
    mark = Path(tempfile.gettempdir(), os.environ["TORCHELASTIC_RUN_ID"])
    if rank() in ranks:
        mark.touch()
        raise ValueError("the cause")
    while not mark.exists():
        os.sched_yield()
    mark.unlink()
    time.sleep(1.5)  # the prompt is open by then
    os._exit(9)


def ignore_sigterm(_):
    signal.signal(signal.SIGTERM, lambda *_: None)
    if rank() == 0:
        breakpoint()
    wait_for_peer("")


def stop_in_a_thread_at_the_end(_):
    main_thread = threading.main_thread()

    def stop():
        main_thread.join()
        try:
            breakpoint()
        except RuntimeError as error:
            print(error, flush=True)

    threading.Thread(target=stop).start()


def stop_once(_):
    breakpoint()
    return 1


def call_from_threads():
    with mpwatch.WorkerGroup(1) as group:
        print(f"first: {list(group.run(stop_once, args=(0,)))}", flush=True)
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(group.run, stop_once, (0,)).exception()
        print(f"second: {error.__cause__}", flush=True)
        print(f"third: {list(group.run(stop_once, args=(0,)))}", flush=True)


def wait_for_event(barrier, event):
    barrier.wait()
    event.wait()


def call_beside_another():
    """Call a function with a breakpoint in the main thread, while a call in the background runs."""
    barrier, event = SPAWN.Barrier(2), SPAWN.Event()
    with mpwatch.WorkerGroup(2) as group:
        waiting = group.submit(wait_for_event, (barrier, event), ranks=1)
        barrier.wait()
        print(f"values: {list(group.run(stop_once, args=(0,), ranks=0).values())}", flush=True)
        event.set()
        waiting.result()


def wait_for_peer(text):
    threading.Event().wait()
    return text


def main(name, ranks, options):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run with these signals ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    options = json.loads(options)
    if options.pop("logs", False):
        options["logs"] = mpwatch.LogSpec(prefix="<{rank}> ")
    function, ranks = globals()[name], json.loads(ranks)
    if name in ("call_from_threads", "call_beside_another"):
        function()
        return
    try:
        if options.pop("group", False):
            with mpwatch.WorkerGroup(2, **options) as group:
                for _ in range(2):
                    print(f"values: {list(group.run(function, args=(ranks,)))}", flush=True)
        else:
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
