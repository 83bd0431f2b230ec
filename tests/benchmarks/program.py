"""The script that makes the call. Whatever it does here, some launchers do again in every rank; so it does nothing.

python program.py MEASURE LAUNCHER RANKS FOLDER
"""

import sys

if __name__ == "__main__":
    from measuring import take

    take(*sys.argv[1:])
