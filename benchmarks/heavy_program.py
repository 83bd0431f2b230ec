"""A script like program.py, after two seconds of imports that no rank needs. It stands for one that imports large libraries.

Once their files are in memory, imports only take CPU time, and ranks that import at the same time share the CPUs. So this
script uses CPU time instead of real imports. It takes two seconds on any machine. To sleep would be wrong: more ranks could
sleep at once than there are CPUs.
"""

import sys
import time

END_OF_IMPORTS = time.process_time() + 2.0
while time.process_time() < END_OF_IMPORTS:
    pass

if __name__ == "__main__":
    from measuring import take_measurement

    take_measurement(*sys.argv[1:])
