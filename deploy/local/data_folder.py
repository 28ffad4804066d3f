"""The data folder of a local stack: where things lie, who holds it, what runs on it.

Owns the lock (one stack a folder) and `stack.json`. Starts and stops nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class DataFolder:
    """`path` is made when it does not exist; the lock is held until `release` or the process's end."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        self.postgres = self.path / "postgres"
        self.blobs = self.path / "blobs"
        self.models = self.path / "models"
        self.logs = self.path / "logs"
        self._state = self.path / "stack.json"
        self._lock_fd: int | None = None

    def create(self) -> None:
        for folder in (self.path, self.blobs, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def lock_fd(self) -> int:
        assert self._lock_fd is not None, "the folder is locked first"
        return self._lock_fd

    def try_lock(self, wait_seconds: float = 0.0) -> bool:
        """Returns whether this process now holds the folder; `wait_seconds` for one that is stopping."""
        if not self.path.is_dir():
            return False
        descriptor = os.open(self.path / "stack.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return False
                time.sleep(0.05)
            else:
                self._lock_fd = descriptor
                return True

    def release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replaces stack.json as a whole: a reader sees the old or the new one."""
        partial = self._state.with_suffix(".part")
        partial.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._state)

    def read_state(self) -> dict[str, Any] | None:
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return state if isinstance(state, dict) else None

    def remove_state(self) -> None:
        self._state.unlink(missing_ok=True)


def default_data_dir() -> Path:
    """Returns $XDG_DATA_HOME/readymark, by default ~/.local/share/readymark."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "readymark"


def process_lives(pid: int) -> bool:
    """Returns False for a dead process and for one that only waits to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # The state stands after the name, which is in brackets and may hold brackets itself.
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return status.rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return True
