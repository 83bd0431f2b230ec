"""Results of runs: the data, and the text and HTML made from it."""
