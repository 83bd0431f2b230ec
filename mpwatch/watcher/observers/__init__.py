"""The data that observers, the log and the live view receive while the ranks run."""
