"""Secrets, certificates and logins, and their files."""
