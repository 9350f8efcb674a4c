"""Commits of processes that do not lead, executed by the leader.

    client ─► request_log (requests) ─► server ─► write_path
    client ◄─ request_log (replies)  ◄─ server

Owns the two logs and their messages. Does not own the execution of a commit (`leader`).
"""
