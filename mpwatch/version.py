"""The version of the package: read by the build, by `mpwatch` and by nodes that compare versions."""

__version__ = "0.1.0"
