"""Programs of users before they move to mpwatch, for test_moving.py. They run unchanged, and with the changes of the page."""

# A program with accelerate. Each rank writes its environment to a file, since accelerate's own launcher returns nothing.
NOTEBOOK = """
import json, os, sys
LAUNCHER

def train(config):
    found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
        json.dump([config, found], file)

notebook_launcher(train, ({"lr": 0.1},), num_processes=2, mixed_precision="bf16", use_port=sys.argv[2])
"""

# A script for torchrun. In each attempt rank 1 exits when rank 0 has printed all.
SCRIPT = """
import json, os, signal, sys

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")

def main():
    print(json.dumps([sys.argv[1:], {name: os.environ[name] for name in NAMES}]))
    print("of rank", os.environ["RANK"], file=sys.stderr)
    sys.stdout.flush(), sys.stderr.flush()
    mark = "printed in attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "0":
        open(mark, "w").close()
        signal.pause()  # until it is stopped
    while not os.path.exists(mark):
        os.sched_yield()
    sys.exit(3)

"""
