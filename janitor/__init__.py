"""The janitor: rules for deletions and inversions in a messaging store, and the programs that apply them."""
