"""The watcher is the part of mpwatch that runs in the caller's process.

Read run.py first, then restarts/run_controller.py, caller.py and event_loop.py.
"""
