"""Jobs of several nodes, end to end. Each node is a Python process, with a host of its own if the machine allows it.

This folder is a package, unlike the other folders of tests: both conftest.py files need names of their own.
"""
