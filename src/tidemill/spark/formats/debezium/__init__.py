"""debezium: change events of Debezium's connectors → rows and deleted keys.

json_events | avro_events ─► events ─► encodings of values
"""
