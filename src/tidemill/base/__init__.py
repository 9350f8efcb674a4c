"""base: shared by all packages: errors, clock and randomness, LSNs, limits, configuration, tasks, status.

    config      tidemill.toml                    runtime   tasks, threads, memory, file descriptors
    status      progress and health of stages    pgtypes   PostgreSQL values in text form

Does no I/O except for reading the configuration, and imports no other package.
"""
