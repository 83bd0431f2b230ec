"""Decides which rank failed first and why, from what the watcher observed.

The event loop, in the watcher thread, records what the watcher observes (observations.py). When an attempt has ended, the
caller's thread runs the diagnosis (diagnose.py).
"""
