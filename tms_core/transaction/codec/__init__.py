"""Tephra's bytes: snapshots, logs and the Thrift structs, decoded and encoded."""
