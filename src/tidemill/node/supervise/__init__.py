"""Supervisor of `tidemill up`: child processes, restarts with back-off.

configuration ─► processes ─► supervisor ─► child_launch ─► child
driver_instances: identical drivers of one pipeline; status: children that do not start
"""
