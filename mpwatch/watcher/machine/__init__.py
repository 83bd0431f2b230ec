"""The state machine of a restart group. Pure: it has no clock, process, pipe or signal. Begin with transitions.py."""
