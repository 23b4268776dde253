"""The three tables in HBase, over Thrift."""
