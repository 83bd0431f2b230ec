"""The state machine of a group of ranks. Pure: no clock, process, pipe or signal."""
