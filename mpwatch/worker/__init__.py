"""Code that runs in a rank."""
