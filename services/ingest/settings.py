"""Settings of the API process (`python -m services.ingest serve`). The worker's are in work_settings.py."""

from __future__ import annotations

import dataclasses

from shared.settings import setting

PREFIX = "READYMARK_INGEST_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Read from READYMARK_INGEST_*; see docs/operations.md for each."""

    database_url: str = setting(secret=True)
    blob_url: str = setting(secret=True)
    # Empty: submissions are not checked against the model of the embedder.
    embedder_address: str = setting("", env="READYMARK_EMBEDDER_ADDRESS")
    listen: str = "127.0.0.1:7401"
    # Empty: health is answered on the main port only.
    health_listen: str = ""
    pool_size: int = 8
    max_upload_bytes: int = 100 << 20
    upload_idle_seconds: float = 15.0
    # At once; each holds up to 6 MiB while its bytes come.
    max_uploads: int = 64
    watch_poll_seconds: float = 0.2
    watch_heartbeat_seconds: float = 10.0
    shutdown_grace_seconds: float = 10.0
    # Terms of the jobs that submissions make.
    max_attempts: int = 3
    retry_delay_seconds: float = 5.0
    lease_seconds: float = 60.0

    def __post_init__(self) -> None:
        at_least_one = ("pool_size", "max_upload_bytes", "max_uploads", "max_attempts", "lease_seconds")
        spans = ("upload_idle_seconds", "watch_poll_seconds", "watch_heartbeat_seconds")
        not_negative = ("retry_delay_seconds", "shutdown_grace_seconds")
        faults = [f"{_variable(name)} must be at least 1" for name in at_least_one if getattr(self, name) < 1]
        faults += [
            f"{_variable(name)} must be above 0 and at most 3600"
            for name in spans
            if not 0 < getattr(self, name) <= 3600
        ]
        faults += [
            f"{_variable(name)} must not be negative" for name in not_negative if getattr(self, name) < 0
        ]
        if faults:
            raise ValueError("\n".join(faults))


def _variable(name: str) -> str:
    return PREFIX + name.upper()
