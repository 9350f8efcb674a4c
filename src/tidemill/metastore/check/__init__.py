"""Checks of stored metadata: the part of `tidemill doctor --deep` that reads the metastore.

    checker.py (rows) ─► files.py (SSTs), objects.py (references), l1.py (extents), registry.py (schemas) ─► findings.py

Read-only. It repairs nothing.
"""
