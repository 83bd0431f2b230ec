"""Send an exception with its traceback from a rank to the caller.

The rank encodes the exception with encoder.py, and the watcher decodes it with decoder.py.
"""
