"""Results of runs: the data, and the text and HTML that are made from the data."""
