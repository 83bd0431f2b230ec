"""The state machine of a call. Read transitions.py first."""
