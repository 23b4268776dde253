"""The archive: deleted rows are kept in files for a while, listed and restored."""
