"""Progress and health of stages, latency histograms, logs.

    stage ──► status.Tracker ──► report ──► status board (consensus/status) ──► freshness.py: the verdict of `why`

Owns the model of a stage's status and its derivation. Does not own where statuses are published.
"""
