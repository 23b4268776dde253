"""Several servers on one HBase: one leads, writes are fenced."""
