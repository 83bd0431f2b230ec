"""Functions that use the operating system. They are for Linux, and work on other POSIX systems with the same system calls.

All tests of `sys.platform` and `os.name` are in this package. If a system call may be missing, the function's docstring says
what the function does then. The watcher and the ranks import these modules. This package imports no other part of mpwatch.
"""
