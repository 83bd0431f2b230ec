"""The version of the package: read by `mpwatch` and by nodes that compare versions. The build takes it from the git tag."""

try:
    from mpwatch._version import VERSION
except ImportError:  # a clone of the repository from which nothing was built or installed
    VERSION = "0+unknown"

__version__: str = VERSION
