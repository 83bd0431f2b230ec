"""`python -m mpwatch`: look into jobs that run on this machine. It launches nothing."""

import argparse
import sys
import time
from collections.abc import Sequence

from mpwatch.results.texts import clean_line
from mpwatch.running_jobs import Job, attach, jobs

COMMANDS = {
    "ps": "list the jobs of this user on this machine",
    "stacks": "show where each rank is, and which ranks wait for which in a collective",
    "watch": "show the live view, until the job ends or until Ctrl-C",
    "debug": "open a prompt of pdb here, in a rank",
    "stop": "ask the ranks to save and return (request_stop); to end them at once, press Ctrl-C in the program itself",
}
JOB = "pid of the program or of a rank, or run_id; not needed if there is only one job"
HEAD = ("PID", "RUN", "FUNCTION", "RANKS", "AGE", "STEP", "STATE")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mpwatch", description="Look into jobs that run on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name != "ps":
            command.add_argument("job", nargs="?", help=JOB)
        if name == "debug":
            command.add_argument("--rank", type=int, default=0, help="global rank (default: 0)")
    options = parser.parse_args(arguments)
    try:
        if options.command == "ps":
            print_jobs()
            return 0
        job = attach(options.job)
        if options.command == "stacks":
            print(job.stacks())
        elif options.command == "watch":
            job.view()
        elif options.command == "debug":
            job.debug(options.rank)
        elif not job.request_stop():
            print("its ranks run no function now", file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        return 130
    except (LookupError, OSError) as error:
        print(f"mpwatch: {error}", file=sys.stderr)
        return 1
    return 0


def print_jobs() -> None:
    rows: list[tuple[str, ...]] = [HEAD]
    for job in jobs():
        try:
            rows.append(describe(job))
        except (LookupError, TimeoutError):  # it has ended
            continue
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def describe(job: Job) -> tuple[str, ...]:
    steps = [progress.step for progress in job.progress().values() if progress.step is not None]
    age = int(time.time() - job.started_at)
    return (
        ",".join(map(str, job.pids)),
        clean_line(job.run_id),
        clean_line(job.fn) or "WorkerGroup",
        str(len(job.ranks)),
        f"{age // 3600}:{age // 60 % 60:02}:{age % 60:02}",
        str(min(steps)) if steps else "-",
        job.state.name,
    )


if __name__ == "__main__":
    sys.exit(main())
