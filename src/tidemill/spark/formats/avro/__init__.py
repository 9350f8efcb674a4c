"""avro: data of a writer's schema → rows.

schema ─► reader ─► columns (many records together) | values (one by one)
"""
