"""The archive: files with deleted rows, their listing and their restore."""
