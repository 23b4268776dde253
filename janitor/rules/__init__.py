"""The law: what may be deleted or inverted. Pure functions, no input or output."""
