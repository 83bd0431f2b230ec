"""The stdout and stderr of the ranks: from their pipes to log files and to the caller. Start with rank_output.py."""
