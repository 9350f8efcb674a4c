"""topics: Kafka topics on object storage.

    produce (order, validation) ─► l0 (upload) ─► partition (the log) ─► acknowledgement
    fetch ◄─ partition, l0, l1;  l1: long-term storage;  compaction, lifecycle, housekeeping, config

Owns the produce path (queue slots, L0 objects, sequence rules, placeholders in fenced logs), partitions and their
leadership, and readers. Does not own the Kafka wire, the rows of the catalogue, or record contents.

- Invariant (order): offsets are contiguous, and follow reservation order per producer.
- Invariant (durable before visible): readers see only durable records; the acknowledgement follows.
- Invariant (poisoning): a queue slot that is abandoned before its batch reaches the log poisons the producer's later
  batches.
- Invariant (proven gaps): only a leader that has just proved its leadership rejects a batch as out of order.
- Invariant (complete outcomes): every accepted batch ends as placed, refused, failed or unknown; none is written
  partially.

Other rooms use `api` only, plus `batch` (codec), and for assembly `local_topics`, `partition_reader`, `membership` and
`produce/producer_ids`.
"""
