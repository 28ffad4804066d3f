"""Refuses documents for a collection whose vectors come from another model than the embedder runs.

Only a courtesy at the door: the worker checks again before it embeds. An embedder that does
not answer refuses nobody.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from shared.errors import ModelMismatchError, ReadymarkError

CACHE_SECONDS = 10.0
TIMEOUT_SECONDS = 1.0


class Model(Protocol):
    @property
    def fingerprint(self) -> str: ...


class ModelSource(Protocol):
    """What this file needs of shared.embedder_client.EmbedderClient."""

    async def refresh_model(self) -> Model: ...


class ModelCheck:
    """`source` is None when no embedder is configured: then everything passes."""

    def __init__(self, source: ModelSource | None) -> None:
        self._source = source
        self._fingerprint: str | None = None
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def require(self, fingerprint: str | None) -> None:
        """Raises ModelMismatchError when the embedder runs another model than `fingerprint` names."""
        if fingerprint is None or self._source is None:
            return
        actual = await self._current(self._source)
        if actual is not None and actual != fingerprint:
            raise ModelMismatchError(
                "EMBEDDING_MODEL_MISMATCH", expected=fingerprint[:12], actual=actual[:12]
            )

    async def _current(self, source: ModelSource) -> str | None:
        async with self._lock:
            # A failure is remembered as well: a dead embedder costs one second in ten.
            if time.monotonic() - self._asked_at > CACHE_SECONDS:
                try:
                    async with asyncio.timeout(TIMEOUT_SECONDS):
                        self._fingerprint = (await source.refresh_model()).fingerprint
                except (ReadymarkError, TimeoutError):
                    self._fingerprint = None
                self._asked_at = time.monotonic()
            return self._fingerprint
