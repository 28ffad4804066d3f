"""Parsers that do what a parser must not. Run in a sandboxed process in place of the real one."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.ingest.model import Asset, Block, BlockKind, Locator, ParsedDocument


def _document(text: str, **fields: Any) -> ParsedDocument:
    block = Block(BlockKind.PARAGRAPH, Locator(0, len(text)))
    return ParsedDocument(media_type="text/plain", text=text, blocks=(block,), **fields)


def _descriptors() -> list[str]:
    return [path.name for path in Path("/proc/self/fd").iterdir()]


def spin(data: bytes, *, on_progress: Callable[[int, int], None], **_: Any) -> ParsedDocument:
    on_progress(1, 2)
    while True:
        pass


def sleep(data: bytes, *, on_progress: Callable[[int, int], None], **_: Any) -> ParsedDocument:
    on_progress(os.getpid(), os.getppid())
    time.sleep(600)  # why: the sandbox has to end it
    raise AssertionError


def allocate(data: bytes, **_: Any) -> ParsedDocument:
    hoard = [bytearray(8 << 20) for _ in range(100_000)]
    return _document(str(len(hoard)))


def abort_on_allocation(data: bytes, *, limits: Any, **_: Any) -> ParsedDocument:
    """What native code does when memory ends."""
    hoard = bytearray(limits.memory_bytes * 6 // 10)
    hoard[::4096] = b"x" * len(hoard[::4096])
    os.abort()


def segfault(data: bytes, **_: Any) -> ParsedDocument:
    ctypes.string_at(0)
    raise AssertionError


def recurse(data: bytes, **_: Any) -> ParsedDocument:
    return recurse(data)


def be_killed(data: bytes, **_: Any) -> ParsedDocument:
    """As the kernel does when the machine runs out of memory; the filter refuses to kill by os.kill."""
    signal.raise_signal(signal.SIGKILL)
    raise AssertionError


def look_around(data: bytes, **_: Any) -> ParsedDocument:
    """Returns a document that tells what the process may and may not do."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        try:
            socket.socket(family).close()
            found.append(f"socket {family.name} allowed")
        except PermissionError:
            found.append(f"socket {family.name} refused")
    try:
        subprocess.run(["/bin/true"], check=False)
        found.append("exec allowed")
    except PermissionError:
        found.append("exec refused")
    try:
        os.kill(os.getppid(), 0)
        found.append("kill allowed")
    except PermissionError:
        found.append("kill refused")
    thread = threading.Thread(target=lambda: found.append("threads work"))
    thread.start()
    thread.join()
    found.append(f"core {resource.getrlimit(resource.RLIMIT_CORE)[0]}")
    found.append(f"files {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}")
    found.append("descriptors " + " ".join(sorted(_descriptors(), key=int)))
    secrets = [name for name in os.environ if name.startswith(("READYMARK_", "OTEL_", "AWS_", "PG"))]
    found.append("secrets " + " ".join(secrets))
    heavy = [name for name in ("grpc", "psycopg", "opentelemetry", "numpy") if name in sys.modules]
    found.append("modules " + " ".join(heavy))
    return _document("\n".join(found))


def write_huge_result(data: bytes, **_: Any) -> ParsedDocument:
    return _document("x" * (8 << 20))


def lie_about_an_asset(data: bytes, *, save_asset: Callable[[str, bytes], None], **_: Any) -> ParsedDocument:
    sha256 = hashlib.sha256(b"something else").hexdigest()
    save_asset(sha256, b"not that")
    return _document("text", assets=(Asset(sha256, "image/png", 8),))


def escape_by_an_asset_name(
    data: bytes, *, save_asset: Callable[[str, bytes], None], **_: Any
) -> ParsedDocument:
    return _document("text", assets=(Asset("../../../etc/passwd", "image/png", 8),))


def overlap_blocks(data: bytes, **_: Any) -> ParsedDocument:
    block = Block(BlockKind.PARAGRAPH, Locator(0, 99))
    return ParsedDocument(media_type="text/plain", text="short", blocks=(block,))


def leave_no_result(data: bytes, **_: Any) -> ParsedDocument:
    os._exit(0)


def babble(data: bytes, **_: Any) -> ParsedDocument:
    """Writes rubbish to every descriptor that it has, its pipe to the worker among them."""
    for name in _descriptors():
        try:
            os.write(int(name), b"\xff" * 100_000 + b"\n")
        except OSError:
            continue
    time.sleep(600)  # why: the sandbox has to end it
    raise AssertionError


def full_disk(data: bytes, **_: Any) -> ParsedDocument:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")
    raise AssertionError
