"""Functions that use the operating system, for Linux and for other POSIX systems with the same system calls.

All checks of `sys.platform` and `os.name` are in this package. If a function needs a system call that may be missing, the
function's docstring says what happens without the system call. This package imports no other part of mpwatch.
"""
