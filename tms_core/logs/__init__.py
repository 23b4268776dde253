"""Log formats, text that is safe in logs and terminals, and calls whose failures are ignored."""
