"""The options of a run. This is validated data; nothing here starts or watches a process."""
