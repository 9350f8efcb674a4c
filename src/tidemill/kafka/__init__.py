"""kafka: the Kafka wire endpoint. Unmodified clients produce to and consume from `topics` through it.

Owns: connections, frames, versions, the codec, one handler per API, the table of error codes, committed
offsets of groups. Does not own: what a partition holds, its order, its durability, its leader, producer ids
and who the nodes are (`topics`), which topics exist (`metastore.catalogue`).

K1  A Produce request reserves every partition batch in request order while its frame is handled: before
    any await, before any task exists (seed 000). Its acknowledgement follows T2.
K2  Responses leave a connection in request order, though requests are worked on concurrently.
K3  A frame's bytes stay untouched until every batch in it has ended; only then is its buffer used again.
K4  Requests under way, half-received frames and answers unsent are bounded, per connection and per process, by not
    reading the socket (`budget`); connections are, in all and per address (`door`).
K5  A malformed frame costs one connection and one log line, never another client. A fault of ours costs the request:
    it is answered, and the connection goes on where the stream is whole.

Start reading at `server` (life), `session` (one connection), `handlers/k00_produce` (the path that matters).
"""

from tidemill.kafka.server.server import KafkaServer
from tidemill.kafka.settings import KafkaSettings

__all__ = ["KafkaServer", "KafkaSettings"]
