"""Questions about single rows: what they hold, and why a message is still there."""
