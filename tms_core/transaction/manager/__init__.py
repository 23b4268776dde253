"""The transaction manager: its state, storage, log and conflicts."""
