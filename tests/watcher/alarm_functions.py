"""Values whose pickling or rebuilding sends a signal to the host. Ranks are not disturbed."""

import contextlib
import os
import signal


def alarm(result=None):
    if "RANK" not in os.environ:
        signal.raise_signal(signal.SIGALRM)
    return result


class Alarms:
    def __reduce__(self):
        return alarm, (alarm(7),)


class SwallowsTheException:
    def __getstate__(self):
        return 1

    def __setstate__(self, _):
        with contextlib.suppress(Exception):
            alarm()


class AlarmsError(Exception):
    def __reduce__(self):
        return rebuild_error, ()


def rebuild_error():
    return alarm(AlarmsError())


def raises_alarms_error():
    raise AlarmsError


def send_sigusr1_to_watcher():
    os.kill(os.getppid(), signal.SIGUSR1)
    return 1
