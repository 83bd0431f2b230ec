"""The processes of the ranks, and what starts, signals, waits for and reaps them."""
