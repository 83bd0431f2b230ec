"""Exceptions with their tracebacks, from a rank to the caller."""
