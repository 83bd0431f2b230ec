"""How the watcher and the ranks agree on the step at which all ranks stop: `mpwatch.should_stop(step)`.

    the first words of each rank's slot (shared_memory.py):  [ asked ][ agreed ][ stopped ][ state ]
    the rank writes asked and stopped, the watcher writes agreed and state

    watcher                                         a rank at should_stop(step)
       |                                               |   asked = step; the state is NONE: False
       |   state = HOLD                                |
       | --------------------------------------------> |   asked = the previous step; wait
       |   after HOLD_SECONDS: read all ranks' `asked` |
       |   agreed = the highest; state = AGREED        |
       | --------------------------------------------> |   step <= agreed: asked = step; False
       |                                               |   step > agreed: stopped = step; True

A rank writes `asked` before it reads `state`, and waits while the state is HOLD, so no rank passes a further step. A write
becomes visible to the other processors in much less than HOLD_SECONDS. A rank that never asks is ignored; the last step of
one that has returned still counts. On several nodes, the watchers agree on the highest step (nodes/coordinator.py).

A step below the previous one begins a new round, such as an epoch. In `asked` and `agreed`, its numbers follow on: after
step 99, the first step of the next epoch is 100.
"""

import struct
import time

WORD = struct.Struct("q")  # in native byte order the eight bytes are written and read at once
ASKED, AGREED_STEP, STOPPED, STATE = range(4)  # the words
NO_STEP = -(1 << 63)
NONE, HOLD, AGREED = range(3)  # the states
NOTHING_ASKED = struct.pack("qqqq", NO_STEP, NO_STEP, NO_STEP, NONE)
HOLD_SECONDS = 0.002
POLL_SECONDS = 0.0005  # a waiting rank reads the state this often


class StopReader:
    """The rank's side, for the words of its slot. Only one thread may use it. The watcher's side is in Slot."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.begin_call()

    def begin_call(self) -> None:
        """Forget the steps of the previous call. The watcher has already cleared the slot for the new call."""
        self._last_step = NO_STEP
        self._offset = 0  # the number of steps in all previous rounds

    def should_stop(self, step: int) -> bool:
        """Return True if the rank must not do this step. Raises ValueError if the step has more than 64 bits."""
        if step < self._last_step:
            self._begin_round(step)
        try:
            self._words[ASKED] = step + self._offset
        except ValueError:
            raise ValueError(f"should_stop() has room for a step of 64 bits, not for {step}") from None
        if self._words[STATE]:
            return self._wait_for_answer(step)
        self._last_step = step
        return False

    def _begin_round(self, step: int) -> None:
        self._offset += self._last_step + 1 - step
        self._last_step = step - 1

    def _wait_for_answer(self, step: int) -> bool:
        words = self._words
        words[ASKED] = self._last_step + self._offset
        while words[STATE] == HOLD:
            time.sleep(POLL_SECONDS)
        if step + self._offset > words[AGREED_STEP]:
            if words[STOPPED] == NO_STEP:
                words[STOPPED] = step
            return True
        self._last_step = step
        words[ASKED] = step + self._offset
        return False
