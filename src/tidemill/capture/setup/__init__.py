"""Requirements of a captured database: settings, privileges, publication, replica identities, slot.

    server_checks ─► session_lock ─► privileges (missing grants as SQL) ─► publication ─► slot
    foreign_publications: demands of other publications ─► identity_withdrawal
    blockers: sessions that make the set-up wait

Owns every statement that changes the database, except for its removal (`session/teardown.py`).
"""
