"""Python imports this module when it starts."""

import os
import sys

print("output of the site", file=sys.stderr)
if os.environ.get("RANK") == "1" and os.environ.get("REFUSE"):
    raise SystemExit("no licence")
