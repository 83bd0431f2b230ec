"""One node of a job, in a process of its own: all that it needs is imported, it says so, and makes the call when it is told to.

python node.py LAUNCHER TASK RANKS FOLDER AT        AT: see launchers.At, as JSON
"""

import json
import os
import sys

if __name__ == "__main__":
    import node_tasks
    from launchers import NODES, At

    launcher, task, ranks, folder, at = sys.argv[1:]
    at = At(**json.loads(at))
    os.environ |= {"BENCH_NODE": str(at.node), "GLOO_SOCKET_IFNAME": "lo"}
    call = NODES[launcher](at)
    print("ready", flush=True)
    assert sys.stdin.readline() == "go\n"
    call(getattr(node_tasks, task), int(ranks), (folder,))
