"""Programs that show the product at work on a sample store."""
