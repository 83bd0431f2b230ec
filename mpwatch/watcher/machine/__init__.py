"""The state machine of a restart group. The machine has no clock, process, pipe or signal. Begin with transitions.py."""
