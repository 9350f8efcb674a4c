"""session: the Spark session of a process: Java, settings, executors.

java (and SPARK_HOME), cds_archive ─► session ─► opener (once per process)
code_shipping, executor_probe: executors of a cluster
"""
