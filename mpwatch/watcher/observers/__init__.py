"""What observers, the log and the live view receive while the ranks run."""
