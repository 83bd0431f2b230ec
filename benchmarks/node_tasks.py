"""The tasks of ranks in a job of several nodes. The ranks send their times to the process of nodes.py, by a FIFO."""

import os
import time

SLEEP_SECONDS = 600.0  # seconds
FAILING_NODE = "1"  # not the node that serves the store


def enter(folder):
    send_message(folder, "entered")


def fail(folder):
    """Raise on one rank of FAILING_NODE once it is released. All other ranks sleep."""
    send_message(folder, "entered")
    if is_failing_rank():
        wait_for_release_and_fail(folder)
    time.sleep(SLEEP_SECONDS)


def fail_in_collective(folder):
    """Raise on one rank of FAILING_NODE once it is released. All other ranks are in a collective."""
    dist = join_process_group()
    send_message(folder, "entered")
    if is_failing_rank():
        wait_for_release_and_fail(folder)
    dist.barrier()


def lose_node(folder):
    """Sleep until FAILING_NODE is lost. Restarted ranks return."""
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        send_message(folder, "restarted")
        return
    send_message(folder, "entered")
    time.sleep(SLEEP_SECONDS)


def lose_node_in_collective(folder):
    """Wait until FAILING_NODE is lost, in a collective on the other node. Restarted ranks return."""
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        send_message(folder, "restarted")
        return
    dist = join_process_group()
    send_message(folder, "entered")
    if os.environ["BENCH_NODE"] == FAILING_NODE:
        time.sleep(SLEEP_SECONDS)
    dist.barrier()


def join_process_group():
    """Return the module torch.distributed when all ranks have joined."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    return dist


def is_failing_rank():
    return (os.environ["BENCH_NODE"], os.environ["LOCAL_RANK"]) == (FAILING_NODE, "0")


def wait_for_release_and_fail(folder):
    fifo = os.open(f"{folder}/release", os.O_RDONLY)
    os.read(fifo, 1)
    send_message(folder, "failed")
    raise RuntimeError("on purpose")


def send_message(folder, name):
    message = f"{name} {time.monotonic()!r} {os.getpid()} {os.environ['BENCH_NODE']}\n"  # JSON would need an import
    fifo = os.open(f"{folder}/arrivals", os.O_WRONLY)
    os.write(fifo, message.encode())
    os.close(fifo)
