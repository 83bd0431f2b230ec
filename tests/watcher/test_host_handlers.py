"""The host's own signal handlers during a run: handlers that raise, set other handlers, fork or log."""

import subprocess
import sys

import pytest

from support.programs import ENV

BEGIN = """
import asyncio, faulthandler, logging, os, signal, sys, threading
import mpwatch
from support import failing, functions
def raise_timeout(*_):
    raise TimeoutError("raised")
def state():
    descriptor = signal.set_wakeup_fd(-1)
    if descriptor != -1: signal.set_wakeup_fd(descriptor)
    return [signal.getsignal(n) for n in signal.valid_signals()], descriptor, threading.active_count(), os.listdir("/proc/self/fd")
"""


def run(program, *args):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, *args], env=ENV, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done


def test_an_exception_of_a_handler_stops_the_run_and_is_raised():
    output = run("""
signal.signal(signal.SIGALRM, raise_timeout)
mpwatch.run(functions.rank, 1)
before = state()
for seconds in [n / 100 for n in range(1, 20)]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try: mpwatch.run(failing.wait_to_be_stopped, 2)
    except TimeoutError as error: print(error)
    assert state() == before
""").stdout
    assert output == "raised\n" * 19


AT_EACH_LINE = """
from support.signal_at_line import SignalAtLine
class CannotBePickled:
    def __reduce__(self): raise ValueError("no")
signal.signal(signal.SIGALRM, raise_timeout)
mpwatch.run(functions.rank, 1)
try: mpwatch.run(functions.rank, 1, args=(CannotBePickled(),))
except mpwatch.LaunchError: pass
before = state()
for name in sys.argv[2:]:
    n = 0
    while True:
        n += 1
        with SignalAtLine(signal.SIGALRM, name, n) as alarm:
            try: mpwatch.run(functions.rank, 1, args=(CannotBePickled(),) if sys.argv[1] == "refused" else ())
            except TimeoutError: outcome = "raised"
            except BaseException as error: outcome = repr(error)
            else: outcome = "returned"
        if not alarm.was_sent: break
        if outcome != "raised" or state() != before: print(name, "line", n, outcome, before, state())
    print(name, "has lines:", n > 1)
"""


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (
            "sent",
            ("accelerators.py", "cgroups.py", "read_process_state", "_is_open", "reserve_port", "CommandQueue.__init__"),
        ),
        ("sent", ("HostSignals.restore", "_list_terminating_signals")),
        ("refused", ("run_until_handler_raises", "_HandlerWatch.replace", "_HandlerWatch.restore")),
    ],
)
def test_an_alarm_is_raised_wherever_it_comes(call, names):
    """TimeoutError is an OSError, which mpwatch handles in many places while it prepares a run."""
    assert run(AT_EACH_LINE, call, *names).stdout.splitlines() == [f"{name} has lines: True" for name in names]


REBUILT = """
host = os.getpid()
def ring(result=None):
    if os.getpid() == host: signal.raise_signal(signal.SIGALRM)
    return result
class Rings:
    def __reduce__(self): return ring, (ring(7),)
class Swallows:
    def __getstate__(self): return 1
    def __setstate__(self, _):
        try: ring()
        except Exception: pass
class RingsError(Exception):
    def __reduce__(self): return rebuild_error, ()
def rebuild_error(): return ring(RingsError())
def fail(): raise RingsError
def attempt(run, *arguments, **options):
    try: print("FAULT: no exception from", run(*arguments, **options))
    except TimeoutError as error: print(error)
    assert state() == before, run
"""


def test_an_exception_of_a_handler_comes_out_of_a_run_that_rebuilds_or_pickles():
    output = run(
        REBUILT
        + """
observer = lambda event: event.name == "run_ended" and ring()
mpwatch.run(functions.rank, 1)
signal.signal(signal.SIGALRM, raise_timeout)
before = state()
attempt(mpwatch.run, Rings, 1)
attempt(mpwatch.run, Swallows, 1)
attempt(mpwatch.run, fail, 1)
attempt(mpwatch.run, repr, 1, args=(Rings(),))
attempt(mpwatch.run, functions.rank, 1, on_event=observer)
"""
    ).stdout
    assert output == "raised\n" * 5


def test_an_exception_of_a_handler_comes_out_of_a_call_that_rebuilds_or_pickles():
    """The ranks stay alive."""
    output = run(
        REBUILT
        + """
observer = lambda event: event.name == "run_ended" and ring()
signal.signal(signal.SIGALRM, raise_timeout)
ranks = mpwatch.WorkerGroup(1, on_event=observer)
ranks.run(functions.rank)
before = state()
attempt(ranks.run, Rings)
attempt(ranks.run, Swallows)
attempt(ranks.run, fail)
attempt(ranks.run, repr, args=(Rings(),))
print(list(ranks.run(functions.rank)), ranks.workers[0].restart_count)
try: ranks.close()
except TimeoutError as error: print(error)
"""
    ).stdout
    assert output == "raised\n" * 4 + "[0] 0\nraised\n"


def test_one_ctrl_c_ends_the_rebuilding_of_a_value():
    output = run("""
host = os.getpid()
def rebuild():
    if os.getpid() == host:
        signal.raise_signal(signal.SIGINT)
        while True: signal.pause()
class Endless:
    def __reduce__(self): return rebuild, ()
def raise_my_own(*_): raise BlockingIOError("mine")
for handler, kind in [(signal.default_int_handler, KeyboardInterrupt), (raise_my_own, BlockingIOError)]:
    signal.signal(signal.SIGINT, handler)
    try: mpwatch.run(Endless, 1)
    except kind as error: print(error.__cause__)
""").stdout
    assert output == "None\nNone\n"


def test_many_handlers_that_raise_in_a_row_leave_nothing():
    run("""
left = 0
def raise_again(*_):
    global left
    if left:
        left -= 1
        raise TimeoutError
signal.signal(signal.SIGALRM, raise_again)
mpwatch.run(functions.rank, 1)
before = state()
for interval in (2e-5, 1e-4, 1e-3) * 5:
    left = 5
    signal.setitimer(signal.ITIMER_REAL, 0.08, interval)
    try: mpwatch.run(failing.wait_to_be_stopped, 1, grace_period=1)
    except TimeoutError: pass
    finally:
        left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert state() == before
""")


def test_a_handler_that_does_not_raise_does_not_disturb_the_run():
    output = run("""
from multiprocessing.connection import Connection
start, end = (Connection(fd) for fd in os.pipe())
def work(end):
    received = []
    signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    end.send(os.getpid())
    os.kill(os.getppid(), signal.SIGUSR1)
    while not received: signal.sigtimedwait([], 0.01)
    return "received"
def relay(*_):
    print(threading.current_thread().name)
    os.kill(start.recv(), signal.SIGUSR1)
signal.signal(signal.SIGUSR1, relay)
print(list(mpwatch.run(work, 1, args=(end,))))
""").stdout
    assert output == "MainThread\n['received']\n"


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_host_whose_wake_up_descriptor_is_closed(when):
    output = run(f"""
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
def close(*_): os.close(write)
signal.signal(signal.SIGUSR1, close)
if {when!r} == "before": close()
def work():
    if {when!r} == "during": os.kill(os.getppid(), signal.SIGUSR1)
    return 1
print(list(mpwatch.run(work, 1)), signal.set_wakeup_fd(-1))
""").stdout
    assert output.startswith("[1] ")


def test_a_signal_at_the_end_of_a_run_reaches_the_host_s_event_loop():
    output = run("""
from mpwatch.watcher import watcher_thread
def at_the_end(*arguments, wait=watcher_thread.wait_for_thread_exit):
    wait(*arguments)
    os.kill(os.getpid(), signal.SIGUSR1)
watcher_thread.wait_for_thread_exit = at_the_end
async def main():
    called = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, called.set)
    mpwatch.run(functions.rank, 1)
    await asyncio.wait_for(called.wait(), 10)
    print("called")
asyncio.run(main())
""").stdout
    assert output == "called\n"


def test_signals_that_c_code_handles_are_left_alone():
    done = run("""
faulthandler.register(signal.SIGTERM, chain=False)
mpwatch.run(functions.rank, 1)
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
""")
    assert done.stdout == "still here\n"
    assert "most recent call first" in done.stderr


def test_a_handler_that_the_host_sets_during_a_run_stays():
    output = run("""
def later(*_): pass
signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGTERM, later))
def work():
    os.kill(os.getppid(), signal.SIGUSR1)
mpwatch.run(work, 1)
print(signal.getsignal(signal.SIGTERM) is later)
""").stdout
    assert output == "True\n"


def test_a_child_forked_by_a_handler_does_not_wait_for_the_ranks():
    output = run("""
parent = os.getpid()
pids = []
def fork(*_): pids.append(os.fork())
signal.signal(signal.SIGUSR1, fork)
def work():
    os.kill(os.getppid(), signal.SIGUSR1)
    return 1
try:
    values = list(mpwatch.run(work, 1))
except RuntimeError as error:
    os._exit(7 if os.getpid() != parent and "forked" in str(error) else 8)
print(values, os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]))
""").stdout
    assert output == "[1] 7\n"


def test_warnings_are_logged_in_the_caller_s_thread():
    """A logging handler may need a lock that the caller holds."""
    output = run("""
lock = threading.RLock()
class Handler(logging.Handler):
    def emit(self, record):
        with lock: print(threading.current_thread().name, record.getMessage())
logging.getLogger("mpwatch").addHandler(Handler())
import atexit
with lock: mpwatch.run(lambda: atexit.register(os._exit, 3) and None, 1)
""").stdout
    assert output == "MainThread rank 0 had returned, and then ended with exit code 3. Its value is kept\n"


def test_a_stopped_run_does_not_log_the_signals_that_it_sent():
    done = run("""
import atexit
def work():
    atexit.register(failing.wait_to_be_stopped)
    atexit.register(os.kill, os.getppid(), signal.SIGINT)
try: mpwatch.run(work, 1)
except KeyboardInterrupt: print("interrupted")
""")
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_a_run_in_a_thread_that_outlives_the_main_thread():
    output = run("""
def late():
    threading.main_thread().join()
    print(list(mpwatch.run(functions.rank, 2)), flush=True)
threading.Thread(target=late).start()
""").stdout
    assert output == "[0, 1]\n"
