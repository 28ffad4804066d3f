"""What a parser process may do. Owns its resource limits and its system call filter.

Called in the child, before the first byte of the document is read. Nothing here can be
undone by the process that it confines.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import platform
import resource
import signal
import struct

from services.ingest.parsing.limits import ParseLimits

_MAX_OPEN_FILES = 64
_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | 1  # EPERM
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4
# On x86-64 a second numbering of the same calls begins here.
_X32_NUMBERS = 0x40000000


@dataclasses.dataclass(frozen=True, slots=True)
class _Architecture:
    audit: int
    refused: tuple[int, ...]


# socket, connect, execve, execveat, ptrace, process_vm_readv, process_vm_writev, io_uring_setup,
# kill, bpf, mount, open_by_handle_at. Sockets of every family: a database may listen on a file.
_ARCHITECTURES = {
    "x86_64": _Architecture(0xC000003E, (41, 42, 59, 322, 101, 310, 311, 425, 62, 321, 165, 304)),
    "aarch64": _Architecture(0xC00000B7, (198, 203, 221, 281, 117, 270, 271, 425, 129, 280, 40, 265)),
}


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when the one that forked it ends, however it ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # It ended before the call above.
        os._exit(1)


def limit_resources(limits: ParseLimits) -> None:
    """Memory, processor time, open files and file sizes end the process or its call when passed."""
    file_bytes = max(limits.max_result_bytes, limits.max_asset_bytes)
    _limit(resource.RLIMIT_CORE, 0, 0)
    _limit(resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes)
    _limit(resource.RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + 2)
    _limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES, _MAX_OPEN_FILES)
    _limit(resource.RLIMIT_FSIZE, file_bytes, file_bytes)


def filter_system_calls() -> bool:
    """Refuses sockets, exec and looking into other processes. False if this system has no such filter."""
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None or platform.system() != "Linux":
        return False
    libc = _libc()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    instructions = _filter(architecture)
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code)))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) == 0)


def _filter(architecture: _Architecture) -> list[bytes]:
    """A refused number jumps to the last instruction, anything else falls through to ALLOW."""
    refused = architecture.refused
    count = len(refused)
    program = [
        _instruction(_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        _instruction(_JUMP_IF_EQUAL, 0, count + 3, architecture.audit),
        _instruction(_LOAD, 0, 0, _NUMBER_OFFSET),
        _instruction(_JUMP_IF_AT_LEAST, count + 1, 0, _X32_NUMBERS),
    ]
    program += [
        _instruction(_JUMP_IF_EQUAL, count - index, 0, number) for index, number in enumerate(refused)
    ]
    program += [_instruction(_RETURN, 0, 0, _ALLOW), _instruction(_RETURN, 0, 0, _REFUSE)]
    return program


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _limit(kind: int, soft: int, hard: int) -> None:
    """Never above the limit that the process came with."""
    _, inherited = resource.getrlimit(kind)
    if inherited != resource.RLIM_INFINITY:
        soft, hard = min(soft, inherited), min(hard, inherited)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (soft, hard))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
