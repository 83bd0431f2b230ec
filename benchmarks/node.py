"""One node of a job, in a process of its own. It imports all modules, prints "ready", waits for "go", and makes the call.

python node.py LAUNCHER TASK RANKS FOLDER CONFIG        CONFIG: a launchers.NodeConfig, as JSON
"""

import json
import os
import sys

if __name__ == "__main__":
    import node_tasks
    from launchers import NODES, NodeConfig

    launcher, task, ranks, folder, config = sys.argv[1:]
    config = NodeConfig(**json.loads(config))
    os.environ |= {"BENCH_NODE": str(config.node), "GLOO_SOCKET_IFNAME": "lo"}
    call = NODES[launcher](config)
    print("ready", flush=True)
    assert sys.stdin.readline() == "go\n"
    call(getattr(node_tasks, task), int(ranks), (folder,))
