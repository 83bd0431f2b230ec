"""What the ranks of a job of nodes do. As tasks.py, but what they say goes to the conductor: see nodes.py."""

import os
import time

__all__ = ["enter", "fail", "fail_in_collective", "lose", "lose_in_collective"]

LONG = 600.0  # seconds
OTHER = "1"  # the node that does not serve the store


def enter(folder):
    say(folder, "entered")


def fail(folder):
    """One fails, on the other node, as soon as it may. All else sleep."""
    say(folder, "entered")
    if is_to_fail():
        await_gate(folder)
    time.sleep(LONG)


def fail_in_collective(folder):
    """The same; but all else are in a collective."""
    dist = join()
    say(folder, "entered")
    if is_to_fail():
        await_gate(folder)
    dist.barrier()


def lose(folder):
    """All sleep, until the other node is lost. Those that come again are done."""
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        say(folder, "again")
        return
    say(folder, "entered")
    time.sleep(LONG)


def lose_in_collective(folder):
    """The same; but all on the node that is left are in a collective."""
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        say(folder, "again")
        return
    dist = join()
    say(folder, "entered")
    if os.environ["BENCH_NODE"] == OTHER:
        time.sleep(LONG)
    dist.barrier()


def join():
    """Returns when all have."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    return dist


def is_to_fail():
    return (os.environ["BENCH_NODE"], os.environ["LOCAL_RANK"]) == (OTHER, "0")


def await_gate(folder):
    gate = os.open(f"{folder}/gate", os.O_RDONLY)
    os.read(gate, 1)
    say(folder, "failed")
    raise RuntimeError("on purpose")


def say(folder, what):
    said = f"{what} {time.monotonic()!r} {os.getpid()} {os.environ['BENCH_NODE']}\n"  # json would be one import more
    door = os.open(f"{folder}/door", os.O_WRONLY)
    os.write(door, said.encode())
    os.close(door)
