"""Publication of one table: what changed since the last one becomes files and manifests, then the pointer moves.

    evaluation ─► table_files ─► manifest_groups ─► publication ─► pointer
                                                       └─► sweep: objects that no listed snapshot names

Decides what is written again. The bytes are those of `format`.
"""
