"""The watcher is the part of mpwatch that runs in the caller's process.

Read run.py first, and then watcher_thread.py and event_loop.py.
"""
