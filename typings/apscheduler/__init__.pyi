"""What this project uses of APScheduler 3, which ships no types."""
