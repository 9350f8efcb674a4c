"""Mutated Kafka frames and record batches against a real broker process (directory and SQLite).

    frames    a good request of every API and version with bytes flipped, cut, inserted, numbers at their limits, counts
              without end, two requests run together, a wrong size prefix
    batches   a good batch in every codec with its header or its (decompressed) records mutated, under a right checksum,
              so that nothing but the check of the records stands between it and the log
Watches: the process is alive; a bystander's records are all acknowledged and in order; kafka-python's decoder, which
shares no code with ours, reads every acknowledged batch whole; resident memory; the longest stall of the loop in
processor time, and for comparison in wall time with the delay of this process.
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import cramjam
import crc32c
from kafka.record.default_records import DefaultRecordBatch

from tidemill.kafka.handlers import APIS
from tidemill.topics.batch import Record, encode_batch, split_batches
from tidemill.topics.batch.compression import CODECS, compress, decompress

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.kafka.processes import Process
from support.kafka.raw import RawClient, batch, decode, example, fetch_body, produce_body, request_frame

STALL_LIMIT_S = 0.05
MEMORY_LIMIT_MB = 1_000
"""Half-received frames, the pool, cached objects and two decoding threads at their limits, and the interpreter."""
TOPIC, BATCHES, QUIET = "fuzz", "batches", "quiet"
NUMBERS = (0, 1, -1, 2, 127, 128, 255, 16_384, 2**15 - 1, -(2**15), 2**31 - 1, -(2**31), 20_000, 20_001, 10**6)


def mutate(rand: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rand.choice((1, 1, 1, 2, 3, 8))):
        at = rand.randrange(len(out) + 1)
        match rand.randrange(7):
            case 0 if at < len(out):
                out[at] = rand.randrange(256)
            case 1:
                del out[at : at + rand.choice((1, 2, 4, 100))]
            case 2:
                out[at:at] = rand.randbytes(rand.choice((1, 2, 4, 50)))
            case 3:
                out[at : at + 4] = struct.pack(">i", rand.choice(NUMBERS))
            case 4:
                out[at : at + 2] = struct.pack(">i", rand.choice(NUMBERS))[2:]
            case 5:
                piece = bytes(out[at : at + rand.randrange(1, 40)])
                out[at:at] = piece * rand.choice((1, 3, 100, 10_000 if len(piece) < 20 else 10))
            case 6:
                out[at:at] = rand.choice((b"\xff" * 5, b"\x80" * 9 + b"\x01", b"\x00" * 64, b"\xfe\xff\xff\xff\x0f"))
    return bytes(out)


def sealed(data: bytearray) -> bytes:
    """Complete a batch with its size and a right checksum."""
    if len(data) >= 21:
        struct.pack_into(">i", data, 8, len(data) - 12)
        struct.pack_into(">I", data, 17, crc32c.crc32c(data[21:]))
    return bytes(data)


def wild_batch(rand: random.Random) -> bytes:
    rows = [
        Record(
            rand.choice((None, b"", b"k" * rand.randrange(40))),
            rand.choice((None, b"", rand.randbytes(rand.randrange(300)))),
            tuple((f"h{i}", rand.choice((None, b"x"))) for i in range(rand.choice((0, 0, 1, 40)))),
            rand.choice((0, 1_700_000_000_000, 2**41)),
        )
        for _ in range(rand.choice((1, 2, 23, 24, 25, 300)))
    ]
    whole = encode_batch(rows)
    head, payload = bytearray(whole[:61]), whole[61:]
    where = rand.randrange(10)
    if where < 6:
        payload = mutate(rand, payload)
    codec = rand.choice(list(CODECS.values()))
    payload = compress(codec, payload) if rand.random() < 0.95 else payload
    if where == 6:
        payload = mutate(rand, payload)
    if where == 7:
        payload = bomb(codec or 4, rand.choice((1 << 20, 1 << 26, 1 << 28)))
    struct.pack_into(">h", head, 21, codec)
    if where == 8:
        head[21:] = mutate(rand, bytes(head[21:]))[:40].ljust(40, b"\x00")
    if where == 9:
        count = rand.choice(NUMBERS)
        struct.pack_into(">i", head, 57, count)
        struct.pack_into(">i", head, 23, max(-(2**31), count - 1))
    return sealed(head + payload)


@cache
def bomb(codec: int, size: int) -> bytes:
    return compress(codec, bytes(size))


def theirs_of(each: bytes) -> DefaultRecordBatch:
    """The batch as kafka-python reads it; it has no library for two of the codecs, so theirs come to it unpacked."""
    codec = each[22] & 7
    unpack = {2: lambda data: decompress(2, memoryview(data)), 4: cramjam.zstd.decompress}.get(codec)
    if unpack is None:
        return DefaultRecordBatch(each)
    head = bytearray(each[:61])
    head[22] &= ~7 & 0xFF
    return DefaultRecordBatch(sealed(head + bytes(unpack(each[61:]))))


def as_java(each: bytes) -> bool:
    """Read the records as Kafka's DefaultRecord does; AssertionError where it would refuse. False when kafka-python,
    which is stricter than the protocol, cannot be asked: attributes not zero, header names that are not UTF-8."""
    data = bytes(decompress(each[22] & 7, memoryview(each)[61:]))
    count = struct.unpack_from(">i", each, 57)[0]
    at, plain = 0, True

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)

    for index in range(count):
        size = varint()
        end = at + size
        plain &= data[at] == 0
        at += 1
        varint()
        assert varint() == index
        for _ in range(2):
            size = varint()
            at += max(0, size)
        for _ in range(varint()):
            name = varint()
            assert name >= 0
            with suppress(UnicodeDecodeError):
                data[at : at + name].decode()
                name = -name
            plain &= name <= 0
            at += abs(name)
            size = varint()
            at += max(0, size)
        assert at == end, (index, at, end)
    assert at == len(data)
    return plain


class Bystander(threading.Thread):
    """An honest client: numbered records, each acknowledged before the next."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self.stopping = False
        self.sent = 0
        self.worst_s = 0.0
        self.failures: list[str] = []

    def run(self) -> None:
        client: RawClient | None = None
        while not self.stopping:
            try:
                client = client or RawClient(self._port, 30.0)
                began = time.monotonic()
                answer = client.ask(0, 8, produce_body(QUIET, [(0, batch([b"%d" % self.sent]))]))
                self.worst_s = max(self.worst_s, time.monotonic() - began)
                found = answer.responses[0].partition_responses[0]
                if (int(found.error_code), found.base_offset) != (0, self.sent):
                    self.failures.append(f"record {self.sent}: error={found.error_code} offset={found.base_offset}")
                    return
                self.sent += 1
            except Exception as error:
                self.failures.append(f"record {self.sent}: {error!r}")
                return
            time.sleep(0.005)


class Lateness(threading.Thread):
    """Delay with which this process is woken, caused by the machine's other work."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.recent: list[tuple[float, float]] = []

    def run(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(0.02)
            self.recent.append((before, time.monotonic() - before - 0.02))
            if len(self.recent) > 5_000:
                del self.recent[:1_000]

    def worst_s(self, since: float) -> float:
        return max((late for at, late in list(self.recent) if at >= since), default=0.0)


class Fuzz:
    def __init__(self, process: Process, seed: int) -> None:
        self.process = process
        self.rand = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.accepted = 0
        self.places = [(a.key, v) for a in APIS.values() for v in range(a.min_version, a.max_version + 1)]
        self.topic_id = uuid.UUID(int=7)
        self.last = ""
        self._clients: dict[str, RawClient] = {}

    def client(self, purpose: str, timeout_s: float) -> RawClient:
        """Return a separate connection for frames and for batches: after a frame its answers cannot be matched."""
        if purpose not in self._clients:
            self._clients[purpose] = RawClient(self.process.port, timeout_s)
        return self._clients[purpose]

    def hang_up(self, purpose: str) -> None:
        client = self._clients.pop(purpose, None)
        if client is not None:
            client.sock.close()

    def frame(self) -> None:
        key, version = self.rand.choice(self.places)
        good = request_frame(key, version, 1, example(key, version, TOPIC, self.topic_id))
        if self.rand.random() < 0.2:
            other = self.rand.choice(self.places)
            good = good[: self.rand.randrange(4, len(good) + 1)] + example(*other, TOPIC, self.topic_id)
        body = mutate(self.rand, good[4:])
        self.last = f"{key} {version} {body[:200].hex()}"
        prefix = struct.pack(">i", len(body)) if self.rand.random() < 0.95 else self.rand.randbytes(4)
        client = self.client("frames", 2.0)  # a mutated Fetch may mean to wait for weeks
        try:
            client.sock.sendall(prefix + body + request_frame(18, 0, 2, b""))
            while client.receive()[0] != 2:
                pass
            self.counts["frames answered"] += 1
        except (OSError, EOFError, struct.error):
            self.counts["frames that ended their connection"] += 1
            self.hang_up("frames")

    def batch(self) -> None:
        data = wild_batch(self.rand)
        try:
            answer = (
                self.client("batches", 60.0)
                .ask(0, 8, produce_body(BATCHES, [(0, data)]))
                .responses[0]
                .partition_responses[0]
            )
        except (OSError, EOFError):
            self.counts["batches that ended their connection"] += 1
            self.hang_up("batches")
            return
        code = int(answer.error_code)
        self.counts[f"batches answered {code}"] += 1
        if code == 0:
            self.accepted += 1
            if answer.base_offset < 0:
                raise AssertionError("acknowledged without an offset")

    def read_back(self) -> list[str]:
        """Every acknowledged batch by an independent decoder."""
        wrong: list[str] = []
        offset, read = 0, 0
        with RawClient(self.process.port, 60.0) as client:
            while True:
                client.send(1, 4, 5, fetch_body(BATCHES, 0, offset, max_wait_ms=0, min_bytes=0, max_bytes=8 << 20))
                part = decode(1, 4, client.receive()[1]).responses[0].partitions[0]
                if int(part.error_code):
                    return [*wrong, f"fetch at {offset}: {part.error_code}"]
                before = offset
                for each in split_batches(bytes(part.records or b"")):
                    data = bytes(each)
                    theirs = theirs_of(data)
                    try:
                        if as_java(data):
                            offsets = [record.offset for record in theirs]
                            if offsets != list(range(offset, offset + len(offsets))):
                                wrong.append(f"offset {offset}: {offsets[:5]}…")
                    except Exception as error:
                        wrong.append(f"offset {offset}: {error!r} {data.hex()[:2_000]}")
                    offset = theirs.next_offset
                    read += 1
                if offset == before:
                    break
        if read < self.accepted:
            wrong.append(f"batches acknowledged {self.accepted}, read {read}")
        self.counts["batches read back"] = read
        return wrong


def run(seconds: float, seed: int) -> dict[str, Any]:
    """{"failures": [sentence], "counts": …, memory and stalls}. Shorter runs throw less of the same."""
    with tempfile.TemporaryDirectory(prefix="tidemill-fuzz-") as directory:
        process = Process(Path(directory), "kafka.partitions_max=2000")
        try:
            return _run(process, seconds, seed)
        finally:
            process.kill()


def _run(process: Process, seconds: float, seed: int) -> dict[str, Any]:
    fuzz = Fuzz(process, seed)
    for name in (TOPIC, BATCHES, QUIET):
        with RawClient(process.port) as client:
            client.ask(3, 1, struct.pack(">ih", 1, len(name)) + name.encode())
    bystander, lateness = Bystander(process.port), Lateness()
    bystander.start()
    lateness.start()
    failures: list[str] = []
    began = time.monotonic()
    looked, worst_stall_s, worst_here_s = began, 0.0, 0.0
    while time.monotonic() - began < seconds and not failures:
        with suppress(ConnectionRefusedError):
            (fuzz.frame if fuzz.rand.random() < 0.6 else fuzz.batch)()
        if time.monotonic() - looked > 10:
            looked = time.monotonic()
            if not process.alive:
                failures.append("the process has ended")
                break
            stall_s, here_s = process.stall_s(), lateness.worst_s(looked - 70)
            worst_stall_s, worst_here_s = max(worst_stall_s, stall_s), max(worst_here_s, here_s)
            if stall_s > STALL_LIMIT_S:
                failures.append(
                    f"the loop stood still: stall_s={stall_s:.3f} late_here_s={here_s:.3f} last={fuzz.last}"
                )
    bystander.stopping = True
    bystander.join(30)
    failures += [f"bystander: {failure}" for failure in bystander.failures]
    if not process.alive:
        failures.append("the process has ended")
    else:
        failures += fuzz.read_back()[:10]
        if process.memory_mb(peak=True) > MEMORY_LIMIT_MB:
            failures.append(f"memory: peak_mb={process.memory_mb(peak=True):.0f}")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "failures": failures,
        "counts": dict(sorted(fuzz.counts.items())),
        "bystander records": bystander.sent,
        "bystander worst ms": round(bystander.worst_s * 1000, 1),
        "longest stall ms": round(worst_stall_s * 1000, 1),
        "stall by the wall clock ms": round(process.metric("tidemill_loop_stall_seconds") * 1000, 1),
        "late here ms": round(worst_here_s * 1000, 1),
        "peak memory MB": round(process.memory_mb(peak=True)) if process.alive else 0,
        "connections refused": process.metric("tidemill_kafka_connections_refused_total") if process.alive else 0,
    }
