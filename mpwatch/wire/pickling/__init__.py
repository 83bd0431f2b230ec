"""Pickle calls and return values. Large buffers, such as the data of arrays, are stored outside the pickles."""
