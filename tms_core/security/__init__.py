"""Secrets, certificates and logins, and the files that hold them."""
