"""derived: tables that are a function of other tables at one common time.

inputs (their changes) ─► group_mirror (rows of the changed groups) ─► function_call ─► function_result ─► derivation
history (version_changes): the versions of a table, from its changes, without Spark
prepared_plan: the physical plan of a function over few rows; idle_advance: advance the time of an idle source
"""
