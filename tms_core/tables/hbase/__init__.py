"""CDAP's three tables in HBase, over Thrift."""
