"""console: the JSON API and the web page of a node.

    status board ─┐                      ┌─► `tidemill status --json`, `why`, `capture list`, `table describe`, …
    catalogue ────┼─► cluster_reader ─► views ─► api ─► static (the page)
    tables ───────┘   row_sample, dead_letter_read, captured_names, written_topics, shared_answer

Owns the views (pure functions; the commands print the same structs), the read-only API with its limits, and static
files (vendored libraries with their licences, no build step). Owns no state but answers of the last seconds, and which
topics have ever had a record: everything is derived from published statuses and stored rows, and only on request.
"""
