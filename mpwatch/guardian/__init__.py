"""The code of the guardian process. Each run starts a guardian. If the watcher is killed, the guardian kills the ranks."""
