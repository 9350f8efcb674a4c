"""Commits at the leader of a domain.

    commit ─► key_claims (queue of those that expect rows) ─► write_path (groups) ─► log

Owns the order of commits and their expectations. Does not own the term (`domain.leader`) or the replicated state.
"""
