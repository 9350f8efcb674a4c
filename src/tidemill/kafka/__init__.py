"""kafka: the Kafka wire endpoint, for unmodified clients.

    socket ─► net ─► server ─► api (dispatch, authorization) ─► handlers ─► topics
                                                            └─► groups, transactions, fetch_sessions, metadata
    schema: codecs of requests and responses

Owns connections, frames, versions, codecs, one handler per API key, error codes, consumer groups and transactions. Does
not own partitions, producer ids or node membership (`topics`), or which topics exist (`metastore`).

K1  A Produce request reserves every partition batch in request order while its frame is handled: before
    any await, before any task exists (seed 000). Its acknowledgement follows T2.
K2  Responses leave a connection in request order, though requests are worked on concurrently.
K3  A frame's bytes stay untouched until every batch in it has ended; only then is its buffer used again.
K4  Requests under way, half-received frames and answers unsent are bounded, per connection and per process, by not
    reading the socket (`net/memory_budget`); connections are, in all and per address (`net/connection_limits`).
K5  A malformed frame costs one connection and one log line, never another client. A fault of ours costs the request:
    it is answered, and the connection goes on where the stream is whole.

Start reading at `server/server.py` (life cycle), `server/client_session.py` (one connection) and
`handlers/k00_produce.py`.
"""

from tidemill.kafka.server.server import KafkaServer
from tidemill.kafka.settings import KafkaSettings

__all__ = ["KafkaServer", "KafkaSettings"]
