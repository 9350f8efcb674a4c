"""Harbour Shop: a TPC-C-like shop, a click stream, a pipeline and a page, run end to end and verified.

    environment (postgres, shop) → runner (load, clicks, pipeline) → follower, invariant_check → latency_report

Owns the schema of the shop, its load, the checks during the run and the report. The data takes the same commands,
configuration and processes as in a user's deployment. Does not own the page, which every node serves
(`tidemill.console`). The demo is not part of the wheel, and imports nothing from the tests.
"""
