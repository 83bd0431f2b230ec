"""The stdout and stderr of the ranks: from their pipes to files and to the caller."""
