"""The state in a table of HBase, beside the store."""
