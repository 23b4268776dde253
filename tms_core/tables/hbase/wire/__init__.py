"""Connections to HBase's Thrift servers below the calls: sockets with a time limit, and what protects them."""
