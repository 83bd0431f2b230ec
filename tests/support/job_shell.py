"""A shell with job control, for one job: `python job_shell.py PROGRAM ARGS`. Its commands are `fg` and `bg`.

It prints "stopped by SIGNAL" when the job has stopped, "in the foreground" after `fg`, "in the background" after `bg`, and
"ended with STATUS" at the end of the job.
"""

import os
import signal
import subprocess
import sys

TERMINAL = 0


def start():
    def go_to_foreground():
        os.tcsetpgrp(TERMINAL, os.getpgrp())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)

    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # for `tcsetpgrp` in the background
    command = [sys.executable, *sys.argv[1:]]
    return subprocess.Popen(command, process_group=0, preexec_fn=go_to_foreground)  # noqa: PLW1509  there is one thread


def wait_in_foreground(pid):
    _, status = os.waitpid(pid, os.WUNTRACED)
    os.tcsetpgrp(TERMINAL, os.getpgrp())
    if os.WIFSTOPPED(status):
        print("\nstopped by", signal.Signals(os.WSTOPSIG(status)).name, flush=True)
        return None
    return os.waitstatus_to_exitcode(status)


def proceed(pid):
    command = input()
    if command == "fg":
        os.tcsetpgrp(TERMINAL, pid)
        print("in the foreground", flush=True)
    os.killpg(pid, signal.SIGCONT)
    if command == "fg":
        return wait_in_foreground(pid)
    _, status = os.waitpid(pid, os.WCONTINUED)
    assert os.WIFCONTINUED(status)
    print("in the background", flush=True)
    return None


job = start()
job.returncode = wait_in_foreground(job.pid)
while job.returncode is None:
    job.returncode = proceed(job.pid)
print("ended with", job.returncode, flush=True)
