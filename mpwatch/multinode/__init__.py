"""Several nodes: the same call on each forms one job. The only part of the core that imports torch.

Nodes meet by torch's own rendezvous (meeting/), which numbers them and gives them a store for the round. In that store
they talk (talk/), and only through the node of group rank 0, the chair:

    member ---- inbox: numbered messages to the chair ----> chair      "here I am", "a rank fails here", "mine have ended"
    member <--- words: numbered, to everybody ------------- chair      "start", "stop", "this came of it"
    member ---- beats ---> chair, and of the chair <--- everybody      signs of life: counters, compared with nothing but
                                                                       themselves, by the clock of who looks

Messages per event grow linearly with the nodes, and the order of the inbox is the one order of what happened on different
nodes: clocks of different hosts are never compared.

    caller's thread      story.py: places and environments of the ranks; what came of an attempt; the result
    thread of the node   link.py: the rendezvous, the board, and the two pure machines, member.py and chair.py
    thread of the ranks  as on one machine; what other nodes do comes in as events: start, call off, lease

A round is one membership. Within it there may be several attempts; another round begins when nodes were lost, or came.

`Agent` (agent.py) is for those who extend this, or have a rendezvous handler of their own (handlers.py). It is imported, and
torch with it, when it is asked for.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpwatch.multinode.agent import Agent, WorkerGroupInfo

__all__ = ["Agent", "WorkerGroupInfo"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(".agent", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
