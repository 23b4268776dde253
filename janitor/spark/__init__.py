"""The janitor's work at cluster size, on Spark.

It uses DataFrames only, without ``SparkContext`` and RDDs, so it works with Spark Connect. pyspark and pyarrow are
optional (``tms-janitor[spark]``), so other packages import this package only if a command needs it.
``docs/how-to/spark.md`` is the guide.
"""
