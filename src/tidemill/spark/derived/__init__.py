"""Derived tables: a function over tables at one common time.

inputs (what changed) ─► group_mirror (rows of the groups concerned) ─► function ─► function_result ─► derivation
idle_advance: progress of an idle source's time
"""
