"""`LogEvents` observes every run, and logs its events to `logging.getLogger("mpwatch")`."""

import logging

from mpwatch.events.types import Event
from mpwatch.results.texts import clean_line

log = logging.getLogger("mpwatch")
ID_LENGTH = 8  # characters of the run_id that are logged, enough to distinguish runs


class LogEvents:
    def wants(self, kind: type[Event]) -> bool:
        return kind.log_level > 0 and log.isEnabledFor(kind.log_level)

    def __call__(self, event: Event) -> None:
        if self.wants(type(event)):
            text = " ".join(str(event).splitlines())
            log.log(event.log_level, "run %s: %s", clean_line(event.run_id)[:ID_LENGTH], clean_line(text))
