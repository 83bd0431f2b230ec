"""What a user sets for a run: validated data, and nothing that acts."""
