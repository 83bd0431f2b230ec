"""Pickle calls, return values and exceptions. Large buffers, such as the data of arrays, lie beside the pickles."""
