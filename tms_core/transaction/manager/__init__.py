"""The transaction manager: state, log and conflicts."""
