"""Decides which rank failed first and why, from what the watcher observed. Runs in the caller's thread."""
