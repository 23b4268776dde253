"""The messaging service over HTTP, as CDAP's own clients speak to it (``docs/reference/rest.md``)."""
