"""The same, after two seconds of imports that no rank needs, as a script has that imports a few large libraries.

Imports are work for a CPU once their files are in memory, and ranks that import at the same time share the CPUs. So they
are stood for by CPU time: it takes two seconds on any machine, where real ones would be cheap on one and dear on another,
and sleep would let more ranks import at once than there are CPUs.
"""

import sys
import time

IMPORTED = time.process_time() + 2.0
while time.process_time() < IMPORTED:
    pass

if __name__ == "__main__":
    from measuring import take

    take(*sys.argv[1:])
