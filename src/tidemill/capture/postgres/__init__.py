"""The wire to PostgreSQL: one libpq connection, the replication stream, pgoutput, status updates.

Owns bytes: simple queries, COPY, START_REPLICATION, message decoding, the standby status update, and the rule of what
may be reported as received and flushed. Does not own the meaning of a change.
"""
