"""Connections to HBase's Thrift servers below the calls: sockets with timeouts, and their protection."""
