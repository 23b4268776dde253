"""The janitor: what may be deleted or inverted in a messaging store, and the programs that do it."""
