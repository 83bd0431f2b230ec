"""The data that the watcher and a rank exchange: messages, shared memory, pickles and exceptions."""
