"""Jobs of several nodes, end to end: each node is a Python process of its own, where the machine allows it a host of its own.

A package, unlike the other folders of tests: it has a conftest.py beside the one above it, and they need names of their own.
"""
