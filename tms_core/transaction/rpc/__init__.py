"""Tephra's transaction service over Thrift: server and client."""
