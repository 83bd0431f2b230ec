"""Pickle calls and return values. Large buffers are stored beside the pickles, not in them."""
