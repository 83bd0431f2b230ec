"""A program: call accelerate's own launcher, and that of mpwatch, in a process that has an Accelerator. Print what was seen.

python notebook_launchers.py PORT

accelerate's own launcher must fail there. An Accelerator changes its process, so this is not in the process of the tests.
"""

import inspect
import json
import os
import sys

from accelerate import Accelerator
from accelerate import notebook_launcher as accelerates_launcher

from mpwatch import RunFailedError, current_worker
from mpwatch.integrations.accelerate import notebook_launcher


class TooBadError(Exception):
    pass


def train(step):
    import torch

    accelerator = Accelerator()
    with accelerator.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    return accelerator.num_processes, str(product.dtype), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], step


def fail():
    if current_worker().restart_count == 1:
        raise TooBadError(current_worker().rank)
    os._exit(1)


def list_parameters(launcher):
    parameters = [p for p in inspect.signature(launcher).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return [(p.name, p.default) for p in parameters if p.name != "function"]


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    results = {"parameters": [list_parameters(accelerates_launcher), list_parameters(notebook_launcher)]}
    try:
        accelerates_launcher(train, (7,), num_processes=2)
    except ValueError as error:
        results["theirs"] = str(error)
    results["values"] = list(notebook_launcher(train, (7,), 2, "BF16", int(sys.argv[1]), "localhost"))
    results["alone"] = notebook_launcher(os.getpid, num_processes=1)[0] != os.getpid()
    try:
        notebook_launcher(fail, num_processes=1, max_restarts=1)
    except RunFailedError as error:
        results["failed"] = [type(error.__cause__) is TooBadError, error.__cause__.args, error.result.restarts]
    print(json.dumps(results, default=str))
