"""Where transaction snapshots come from: a folder, HDFS, a service."""
