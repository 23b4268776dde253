"""The janitor's work at cluster size, on Spark.

Everything here goes through DataFrames: no ``SparkContext`` and no RDDs, so that Spark Connect will do. pyspark and
pyarrow are an optional part of the installation (``tms-janitor[spark]``), so nothing outside this package imports it
before a command needs it. ``docs/how-to/spark.md`` is the guide.
"""
