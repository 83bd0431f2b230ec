"""A program: a node that joins a round of two. It prints when it loses the store, and how long it then takes to close.

lonely.py ENDPOINT NODE_TIMEOUT
"""

import sys
import time

from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.errors import StoreLostError
from mpwatch.options.rendezvous import Rendezvous


def report(*values):
    print(*values, flush=True)


client = RendezvousClient(Rendezvous(sys.argv[1], "job", (1, 2), node_timeout=float(sys.argv[2])))
client.connect(time.monotonic() + 60)
report("connected", client.is_host, client.address)
formed = client.join(time.monotonic() + 60, last_call=60)
report("joined", formed.group_rank, formed.group_world_size)
reached_at = time.monotonic()
try:
    while True:
        client.count_waiting_nodes()
        reached_at = time.monotonic()
        time.sleep(0.05)
except StoreLostError as error:
    lost_at = time.monotonic()
    report("lost", lost_at - reached_at, error)
client.close()
report("closed", time.monotonic() - lost_at)
