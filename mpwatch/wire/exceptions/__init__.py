"""Send an exception with its traceback from a rank to the caller.

The rank uses encoder.py, and the watcher uses decoder.py.
"""
