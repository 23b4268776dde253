"""Topics and their messages: published, fetched, rolled back (``docs/formats.md``)."""
