"""One pass over a store: find due rows, delete or invert them, and record the changes."""
