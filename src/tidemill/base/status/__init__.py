"""Progress and health of stages, latency histograms, logs.

    stage ──► StatusTracker ──► report ──► status board (consensus/status) ──► freshness.py: the verdict of `why`

Owns the model of a stage's status and the derivation of its state. Does not own where statuses are published.
"""
