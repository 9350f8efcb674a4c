"""The status board: every process publishes the statuses of its stages and can read those of all processes.

base/status ──► pages.py (pieces that fit a register) ──► registers in consensus ──► board.py readers
"""
