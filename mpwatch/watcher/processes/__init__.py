"""The processes of the ranks: how the watcher starts them, sends them signals, waits for them and reaps them."""
