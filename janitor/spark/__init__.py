"""The janitor's work at cluster size, on Spark.

It uses DataFrames only, without ``SparkContext`` and RDDs, so Spark Connect is enough. pyspark and pyarrow are optional
(``tms-janitor[spark]``), so other packages import this one only if a command needs it. ``docs/how-to/spark.md`` is the
guide.
"""
