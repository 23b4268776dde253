"""How log lines look, text that is safe in them, and calls whose failure must not matter."""
