"""What the operating system offers: Linux first, other POSIX systems where they have the same calls.

All tests of `sys.platform` and `os.name` live in this package. Where a system lacks a call, the function's docstring says
what happens instead. The watcher and the ranks import these modules. The package imports nothing else of mpwatch.
"""
