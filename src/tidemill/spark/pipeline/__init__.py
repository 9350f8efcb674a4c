"""pipeline: the driver process, which assembles pipelines, runs them and reports their status.

driver ─► runner (one pipeline) or shared_driver (several on one session) ─► ingest, derived ─► status_report
parked: a pipeline that does not run
"""
