"""Capture, stage 5: records into topics, exactly once, and their bindings.

    fragment ─► topic_writer ─► record_writer ─► partition_writer ─► batch_builder ─► batch_sender ─► topics
                    └─► commit boundaries ─► binder

Owns positions of a topic's partitions and the repair of failed sends. Does not confirm to PostgreSQL.
"""
