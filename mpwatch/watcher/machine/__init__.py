"""The state machine of a restart group. The state machine uses no clock, process, pipe or signal.

Begin with transitions.py.
"""
