"""Pickle calls and return values, with large buffers beside the pickles."""
