"""Topics and messages: publish, fetch, roll back and consume (``docs/reference/formats/rows.md``)."""
