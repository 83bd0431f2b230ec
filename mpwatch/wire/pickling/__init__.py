"""Calls and return values as pickles, with large buffers beside them."""
