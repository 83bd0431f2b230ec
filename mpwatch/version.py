"""The version of the package. The nodes of a job compare their versions of mpwatch.

The build takes the version from the git tag.
"""

try:
    from mpwatch._version import VERSION
except ImportError:  # a clone of the repository from which nothing was built or installed
    VERSION = "0+unknown"

__version__: str = VERSION
