"""The state in an HBase table next to the store's tables."""
