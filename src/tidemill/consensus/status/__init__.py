"""The status board: each process publishes the statuses of its stages, every process can read all of them.

base/status ──► pages.py (pieces that fit a register) ──► registers in consensus ──► board.py readers
"""
