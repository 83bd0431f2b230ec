"""The code of the guardian process. Each run starts one. It outlives a watcher that is killed, and kills the ranks then."""
