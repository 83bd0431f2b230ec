"""The data that crosses between the watcher and a rank: messages, shared memory, pickles and exceptions."""
