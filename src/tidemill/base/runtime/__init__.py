"""The runtime of a process: tasks, threads, memory and file descriptors.

    tasks.py              task groups, supervision, back-off, retried opening of stores
    coop.py, loop_lag.py  bounded turns of the event loop, and its lag
    blocking_portal.py    the event loop and asynchronous contexts for synchronous code
    memory_budget.py, file_descriptors.py, gc_tuning.py   shares of a process's resources

Owns no domain logic: everything here could serve another project.
"""
