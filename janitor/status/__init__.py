"""The status of a janitor for operators, as one frozen value."""
