"""Handle the signal of submitit: when a task receives the signal, mpwatch asks all ranks to stop at the same step."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import submitit

import mpwatch

POLL_SECONDS = 0.5  # between two requests to ranks that have not been started yet


@contextmanager
def stop_when_preempted() -> Iterator[threading.Event]:
    """Within the block, ask all ranks to stop when this process gets the signal of submitit. Yield an Event that is set
    then.

    Python runs handlers only in the main thread, which may be waiting for a lock. So the number of the signal is read from a
    socket (`signal.set_wakeup_fd`) by the thread "mpwatch preemption", which also gets the signal, since the calling thread
    blocks it, and with it what that starts, such as the guardian.
    """
    number = preemption_signal()
    is_preempted, is_over = threading.Event(), threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def follow() -> None:
        while data := reader.recv(64):
            if number in data:
                is_preempted.set()
                while not mpwatch.request_stop() and not is_over.wait(POLL_SECONDS):
                    pass  # the ranks have not been started yet

    thread = threading.Thread(target=follow, name="mpwatch preemption")
    thread.start()  # with the signal not blocked
    signal.signal(number, lambda *_: None)  # for good, since submitit would queue a job again that the driver has given up
    wakeup_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield is_preempted
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(wakeup_fd)
        is_over.set()
        writer.close()
        thread.join()
        reader.close()


def preemption_signal() -> signal.Signals:
    return signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]
