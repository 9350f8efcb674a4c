"""derived: tables that are a function of other tables at one common time.

inputs (their changes) ─► group_mirror (rows of the changed groups) ─► function ─► function_result ─► derivation
idle_advance: advance the time of an idle source
"""
