"""The sources of transaction snapshots: a folder, HDFS, a transaction service."""
