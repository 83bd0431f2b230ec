"""What runs in the guardian: a small process of its own for each run, which outlives a watcher that is killed."""
