"""Functions that use the operating system, for Linux and for other POSIX systems with the same system calls.

All checks of `sys.platform` and `os.name` are here, and docstrings say what happens without a system call. This package
imports no other part of mpwatch.
"""
