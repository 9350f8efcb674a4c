"""topics: Kafka topics on object storage.

    produce (order, validation) ─► l0 (upload) ─► partition (the log) ─► acknowledgement
    fetch ◄─ partition, l0, l1;  l1: long-term storage;  compaction, lifecycle, config

Owns the produce path (queue slots, L0 objects, sequence rules, placeholders in fenced logs), partitions and their
leadership, and readers. Does not own the Kafka wire, the rows of the catalogue, or record contents.

T1  Offsets are contiguous, and follow reservation order per producer.
T2  Readers see only what is durable; an acknowledgement follows.
T3  A place in line given up without reaching the log poisons what its producer has behind it (seed 000).
T4  Nothing is refused as out of order but by a leader that has just proved that it leads.
T5  Every batch that was taken ends as placed, refused, failed or unknown; none is written by half.

Other rooms use `api` alone, with `batch` (codec), `local_topics`, `partition_reader`, `membership` and
`produce/producer_ids` for assembly.
"""
