"""What observers and the live view are given while the ranks run."""
