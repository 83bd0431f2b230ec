"""The state machine of a restart group. Read transitions.py first."""
