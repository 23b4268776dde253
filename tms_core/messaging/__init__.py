"""Topics and their messages: published, fetched, rolled back (``docs/reference/formats/rows.md``)."""
