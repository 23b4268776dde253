"""Topics as streams: read by message id, published once."""
