"""Carry an exception with its traceback from a rank to the caller: encoder.py in the rank, decoder.py in the watcher."""
