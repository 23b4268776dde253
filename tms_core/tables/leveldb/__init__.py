"""CDAP's three tables in LevelDB."""
