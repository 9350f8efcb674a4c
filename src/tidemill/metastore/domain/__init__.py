"""One replicated database of rows: a fenced log, a leader, followers, files in the bucket.

    commit ─► commit (claims, group commit) ─► log ─► apply ─► memtable of the leader and followers
    commit elsewhere ─► forwarding (request log) ─► commit
    read ─► read_path (barrier) ─► leader or follower
    persist_loop ─► flush ─► files ─► replicated_manifest ─► log

Owns leadership of the domain, its replicated state and the order of commits. Does not own file formats (`lsm`) or the
meaning of rows (`rows`).
"""
