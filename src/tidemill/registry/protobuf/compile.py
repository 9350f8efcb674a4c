"""Compilation of a .proto text to its descriptor by protoc, in a separate process. An untrusted text is limited
there in time and memory, and a crash of the compiler does not reach the node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tidemill.base.errors import UnavailableError
from tidemill.registry.errors import invalid_schema

TIMEOUT_S = 20.0
"""Wall-clock limit. A schema at its size limit takes a fraction of a second on a free processor."""

CPU_S = 10
MEMORY_BYTES = 1 << 30
MESSAGE_CHARS_MAX = 500

_LIMITED_PROTOC = """
import resource, sys
cpu_s, memory_bytes, *rest = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s)))
resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
from grpc_tools.protoc import main
sys.exit(main(["protoc", *rest]))
"""
"""Program of the process, which limits itself: a hook between fork and exec is not safe in a process with threads."""


def compile_text(text: str, name: str, imports: Sequence[Any]) -> Any:
    """Return the FileDescriptorProto of `text` as a file `name`, which may import `imports`.

    Raises RegistryError with protoc's message, UnavailableError when protoc cannot be run.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    with TemporaryDirectory(prefix="tidemill-proto-") as place:
        folder = Path(place)
        (folder / "src").mkdir()
        (folder / "src" / name).write_text(text, encoding="utf-8")
        (folder / "imports").write_bytes(FileDescriptorSet(file=imports).SerializeToString())
        command = [
            sys.executable,
            "-c",
            _LIMITED_PROTOC,
            str(CPU_S),
            str(MEMORY_BYTES),
            f"--proto_path={folder / 'src'}",
            f"--descriptor_set_in={folder / 'imports'}",
            f"--descriptor_set_out={folder / 'out'}",
            name,
        ]
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"protoc did not end: timeout_s={TIMEOUT_S}.") from error
        except OSError as error:
            raise UnavailableError(f"protoc cannot be run: error={error.strerror}.") from error
        if ended.returncode != 0:
            lines = ended.stderr.decode(errors="replace").splitlines()
            reported = "; ".join(line[line.index(name) :] for line in lines if f"{name}:" in line)
            raise invalid_schema(reported[:MESSAGE_CHARS_MAX] or f"protoc ended with {ended.returncode}")
        found = FileDescriptorSet.FromString((folder / "out").read_bytes())
    return next(file for file in found.file if file.name == name)
