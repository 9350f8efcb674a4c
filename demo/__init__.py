"""Harbour Shop: a TPC-C-like shop, a click stream, a pipeline and a page, run end to end and verified.

Owns the demo's schema, load, page and report. Everything it shows goes through the same commands,
configuration and processes that a user's own deployment has.
"""
