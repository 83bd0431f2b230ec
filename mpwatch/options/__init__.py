"""The options of a run, as validated data. This package neither starts nor watches a process."""
