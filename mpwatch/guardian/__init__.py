"""The code of the guardian, a process that kills the ranks of a run if the watcher is killed."""
