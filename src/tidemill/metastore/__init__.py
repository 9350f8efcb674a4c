"""metastore: what exists and what lies where, as typed rows in domains.

Owns the rows' layouts and their routing, the database of each domain on object storage (`lsm`), its replication
through consensus (`domain`), the catalogue, and what a restore needs. Does not own what a topic or shard means by
a row. Other rooms use `catalogue`, `metastore`, `rows` and `open`.
"""
