"""The janitor's state between runs."""
