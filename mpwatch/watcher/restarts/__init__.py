"""Decides whether, when and how failed ranks are restarted."""
