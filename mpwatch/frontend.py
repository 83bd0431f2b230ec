"""What the caller is sitting at."""

import sys

__all__ = ["is_notebook"]


def is_notebook() -> bool:
    """Whether this program is the kernel of a notebook: IPython's, with a front end that shows what its cells print."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
