"""The three tables in LevelDB, as CDAP keeps them."""
