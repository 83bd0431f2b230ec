"""The script that makes the call. Its top level does nothing, since some launchers run it again in every rank.

python program.py MEASURE LAUNCHER RANKS FOLDER
"""

import sys

if __name__ == "__main__":
    from measuring import take_measurement

    take_measurement(*sys.argv[1:])
