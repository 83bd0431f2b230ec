"""Functions for ranks whose clocks are frozen, or whose watcher has frozen clocks."""

import signal

from freezegun import freeze_time

import mpwatch
from support.failing import raises_value_error, wait_to_be_stopped


def is_deaf_to_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_to_be_stopped()


def sends_a_heartbeat_in_frozen_time():
    with freeze_time("2020-01-01"):
        mpwatch.heartbeat()
        wait_to_be_stopped()


def raises_at_first():
    if mpwatch.current_worker().restart_count == 0:
        raises_value_error()
