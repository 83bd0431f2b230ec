"""A module that starts ranks at its import, in the way that LAUNCH names."""

import os

import mpwatch


def fn():
    return os.getpid()


with open("imports", "a") as imports:
    print(os.getpid(), file=imports)
generation = int(os.environ.get("GENERATION", "0"))
os.environ["GENERATION"] = str(generation + 1)
way = os.environ["LAUNCH"] if generation < 3 else ""  # in case nothing else stops it
if way == "run":
    mpwatch.run(fn, 1)
elif way == "main":
    mpwatch.main(fn, 1)
elif way == "group":
    with mpwatch.WorkerGroup(1) as group:
        group.run(fn)
