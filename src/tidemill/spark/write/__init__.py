"""write: the rows of a DataFrame into a shard, all of them or none, by one compare-and-append.

    tasks     rows → sorted by hash → chunks by hash range → one staged object for many rows     (staging)
    commit    range by range: staged rows and the shard's contents → updates at one time → parts (updates)
              one compare-and-append; a lost race reads again and appends at the new upper        (commit)

Staged objects belong to no shard and are named by nothing but the job's messages: what a failed task or job leaves is
invisible, and a maintenance job deletes it by age.
"""

WRITES = "write"
"""Begins the tokens of these appends, and the names of the holds while they are computed."""
