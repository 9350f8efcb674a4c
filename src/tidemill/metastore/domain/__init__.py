"""One replicated database of rows: a fenced log, a leader, followers, files in the bucket.

    commit ─► write_path (group commit) ─► key_claims ─► log ─► apply ─► memtable of the leader and followers
    commit elsewhere ─► forwarding (request log) ─► write_path
    read ─► read_path (barrier) ─► leader or follower
    flush ─► files ─► replicated_manifest ─► log

Owns leadership of the domain, its replicated state and the order of commits. Does not own file formats (`lsm`) or the
meaning of rows (`rows`).
"""
