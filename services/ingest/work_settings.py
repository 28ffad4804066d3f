"""Settings of the worker process (`python -m services.ingest work`)."""

from __future__ import annotations

import dataclasses

from shared.settings import setting

PREFIX = "READYMARK_INGEST_"
MAX_BEAT_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkSettings:
    """Read from READYMARK_INGEST_*; see docs/operations.md for each."""

    database_url: str = setting(secret=True)
    blob_url: str = setting(secret=True)
    embedder_address: str = setting("127.0.0.1:7402", env="READYMARK_EMBEDDER_ADDRESS")
    slots: int = 2
    lease_seconds: float = 60.0
    poll_seconds: float = 1.0
    chunk_max_tokens: int = 256
    chunk_overlap_tokens: int = 32
    parse_timeout_seconds: float = 120.0
    parse_memory_bytes: int = 2 << 30
    # The same limit that `serve` accepts uploads by.
    max_upload_bytes: int = 100 << 20
    embed_patience_seconds: float = 120.0
    sweep_seconds: float = 300.0
    orphan_grace_seconds: float = 3600.0

    def __post_init__(self) -> None:
        faults = []
        if self.slots < 1:
            faults.append(f"{PREFIX}SLOTS must be at least 1")
        if self.lease_seconds < 1:
            faults.append(f"{PREFIX}LEASE_SECONDS must be at least 1")
        if not 0 < self.poll_seconds <= 60:
            faults.append(f"{PREFIX}POLL_SECONDS must be above 0 and at most 60")
        if not 0 <= self.chunk_overlap_tokens * 2 <= self.chunk_max_tokens:
            faults.append(f"{PREFIX}CHUNK_OVERLAP_TOKENS must be at most half of {PREFIX}CHUNK_MAX_TOKENS")
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def heartbeat_seconds(self) -> float:
        """A third of the lease, so that two beats may fail; and soon: it also notices a cancelled job."""
        return min(self.lease_seconds / 3, MAX_BEAT_SECONDS)
