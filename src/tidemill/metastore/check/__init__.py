"""Checks of stored metadata: what `tidemill doctor --deep` reads of the metastore.

    checker.py (rows) ─► files.py (SSTs), objects.py (references), l1.py (extents), registry.py (schemas) ─► findings.py

Reads only. Does not repair.
"""
