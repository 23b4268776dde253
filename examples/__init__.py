"""Example programs that run the product on a sample store."""
