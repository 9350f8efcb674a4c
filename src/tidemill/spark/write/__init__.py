"""write: append the rows of a DataFrame to a shard, all or none, by one compare-and-append.

    tasks     rows → sorted by hash → chunks by hash range → one staged object for many rows     (staging)
    commit    range by range: staged rows and the shard's contents → updates at one time → parts
              one compare-and-append; after a lost race, read again and append at the new upper   (commit)

Staged objects belong to no shard, and only the job's messages name them. Objects that a failed task or job leaves
behind are invisible, and a maintenance job deletes them by age.
"""

WRITES = "write"
"""Prefix of the tokens of these appends, and of the names of the read holds while they are computed."""
