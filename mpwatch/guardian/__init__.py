"""The code of the guardian process, which each run starts. If the watcher is killed, the guardian kills the ranks."""
