"""Tephra's encodings: snapshots, logs and Thrift structs."""
