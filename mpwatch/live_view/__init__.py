"""The live view of the ranks, in the caller's process: in a terminal, in a notebook, or as plain lines."""
