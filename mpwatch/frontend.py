"""What the caller is sitting at."""

import sys

__all__ = ["in_notebook"]


def in_notebook() -> bool:
    """Whether a kernel of Jupyter's runs us, and not IPython in a terminal."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None
