"""Background work of a node's topics: it follows the catalogue, applies retention, reconciles, and reports.

loops.py           the supervised loops
reconciliation.py  which partitions are handed to the reconciler

Does not own what a round does: retention is in `lifecycle`, reconciliation in `l1`, the statuses in `status_report`.
"""
