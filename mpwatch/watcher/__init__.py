"""The watcher: the part that runs in the caller's process. Begin with run.py, then watcher_thread.py and event_loop.py."""
