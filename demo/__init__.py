"""Harbour Shop: a TPC-C-like shop, a click stream, a pipeline and a page, run end to end and verified.

    environment (postgres, shop) → runner (load, clicks, pipeline) → follower, invariant_check → latency_report

Owns the schema of the shop, its load, the checks during the run, the report and the page of the shop (`page`), which
its nodes serve under /demo/ as their configuration asks (`http.pages`). The data takes the same commands,
configuration and processes as in a user's deployment. The demo is not part of the wheel, and imports nothing from the
tests.
"""
