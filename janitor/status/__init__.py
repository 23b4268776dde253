"""What an operator sees of a janitor, as one frozen value."""
