"""The runtime of a process: tasks, threads, memory and file descriptors.

    tasks.py              task groups, supervision, back-off
    coop.py, loop_lag.py  bounded turns of the event loop, and how late it runs
    blocking_portal.py    the event loop as seen from synchronous code; sync_context.py for contexts
    memory_budget.py, file_descriptors.py, gc_tuning.py   shares of what a process has

Owns no domain logic: everything here could serve another project.
"""
