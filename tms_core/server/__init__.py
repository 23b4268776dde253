"""The messaging service over HTTP, compatible with CDAP's clients (``docs/reference/rest.md``)."""
