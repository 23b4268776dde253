"""One pass over the tables: find due rows, delete or invert them, record the work."""
