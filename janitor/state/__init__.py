"""What the janitor remembers between runs, and where."""
