"""The clock of all limits and delays. Tools that freeze the time of a test (freezegun, time-machine) do not replace it.

Such tools replace `time.monotonic` and `time.time`, and with a frozen clock no limit would ever expire. They leave
`time.clock_gettime` as it is, except that time-machine also changes the wall clock there.
"""

import time
from functools import partial

# What `time.monotonic` reads, on Linux and on macOS. All processes of a machine share it.
monotonic = partial(time.clock_gettime, getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC))
# For comparisons with the times of files. Times that are only shown to users come from `time.time`.
wall_time = partial(time.clock_gettime, time.CLOCK_REALTIME)
