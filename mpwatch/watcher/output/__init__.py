"""Passes the stdout and stderr of the ranks on to log files and to the caller. Start with rank_output.py."""
