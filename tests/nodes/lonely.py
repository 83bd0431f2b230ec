"""A program: a node that joins a round of two, and tells when it finds itself cut off, and how long it takes to give up.

lonely.py ENDPOINT NODE_TIMEOUT
"""

import sys
import time

from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.errors import StoreLostError
from mpwatch.options.rendezvous import Rendezvous


def tell(*words):
    print(*words, flush=True)


engine = RendezvousClient(Rendezvous(sys.argv[1], "job", (1, 2), node_timeout=float(sys.argv[2])))
engine.connect(time.monotonic() + 60)
tell("connected", engine.is_host, engine.address)
formed = engine.join(time.monotonic() + 60, last_call=60)
tell("joined", formed.group_rank, formed.group_world_size)
well = time.monotonic()
try:
    while True:
        engine.waiting()
        well = time.monotonic()
        time.sleep(0.05)
except StoreLostError as error:
    lost = time.monotonic()
    tell("lost", lost - well, error)
engine.close()
tell("closed", time.monotonic() - lost)
