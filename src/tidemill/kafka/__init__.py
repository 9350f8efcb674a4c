"""kafka: wire endpoint for unmodified clients.

    socket ─► net ─► server ─► api (dispatch, authorization) ─► handlers ─► topics
                                                            └─► groups, transactions, fetch_sessions, metadata
    schema: codecs of requests and responses

The endpoint owns connections, frames, versions, codecs, one handler per API key, error codes, consumer groups and
transactions. It does not own partitions, producer ids or node membership (`topics`), nor which topics exist
(`metastore`).

Invariants:

- Produce order: a Produce request reserves every partition batch in request order while its frame is handled, before
  any await and before any task exists. It is acknowledged when `topics` reports the batch as durable.
- Response order: responses leave a connection in request order, although requests run concurrently.
- Frame lifetime: the bytes of a frame stay untouched until every batch in it has ended; only then is its buffer reused.
- Bounded memory: running requests, half-received frames and unsent answers are bounded per connection and per process,
  by not reading the socket (`net/memory_budget`). Connections are bounded in total and per address
  (`net/connection_limits`).
- Isolated faults: a malformed frame costs one connection and one log line and never affects another client. An internal
  error costs one request: the request is answered, and the connection continues if its stream is intact.

Start reading at `server/server.py` (life cycle), `server/client_session.py` (one connection) and
`handlers/k00_produce.py`.
"""

from tidemill.kafka.server.server import BrokerServices, KafkaServer
from tidemill.kafka.settings import KafkaSettings

__all__ = ["BrokerServices", "KafkaServer", "KafkaSettings"]
