"""Programs for developers of the project."""
