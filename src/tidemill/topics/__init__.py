"""topics: Kafka topics on object storage.

Owns the produce path (places in line, L0 objects, sequence rules, placeholders in fenced logs), partitions and
their leadership, and the readers of both. Does not own the Kafka wire, the catalogue's rows, or record contents.

T1  Offsets are contiguous, and follow reservation order per producer.
T2  Readers see only what is durable; an acknowledgement follows.
T3  A place in line given up without reaching the log poisons what its producer has behind it (seed 000).
T4  Nothing is refused as out of order but by a leader that has just proved that it leads.
T5  Every batch that was taken ends as placed, refused, failed or unknown; none is written by half.

`front` is all that kafka, capture and spark may use, with `batch` (codec), `log.LocalTopics`,
`reader.PartitionReaderImpl`, `leadership.Membership` and `producer_ids.ProducerIds` for assembly.
"""
