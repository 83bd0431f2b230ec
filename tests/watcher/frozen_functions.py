"""Functions for ranks whose clocks are frozen, or whose watcher has frozen clocks."""

import signal

from freezegun import freeze_time

import mpwatch
from support.failing import wait_to_be_stopped


def is_deaf_to_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_to_be_stopped()


def is_silent_in_frozen_time_in_the_first_attempt():
    if mpwatch.current_worker().restart_count == 0:
        with freeze_time("2020-01-01"):
            mpwatch.heartbeat()
            wait_to_be_stopped()
