"""The settings of the search service, each from one environment variable. Read once, in __main__."""

from __future__ import annotations

import dataclasses

from shared.settings import setting

PREFIX = "READYMARK_SEARCH_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    # Logs in as readymark_searcher, who may read the search views and nothing else.
    database_url: str = setting(secret=True)
    embedder_address: str = setting("127.0.0.1:7402", env="READYMARK_EMBEDDER_ADDRESS")
    listen: str = "127.0.0.1:7403"
    # Empty: health is served on the main port only.
    health_listen: str = ""
    # About twice the cores of the database, divided by the number of search processes.
    pool_size: int = 4
    # How long a call waits for a free connection before it is refused as OVERLOADED.
    pool_wait_seconds: float = 1.0
    max_concurrent_calls: int = 256
    # Up to so many candidates every vector is compared, which misses nothing: 2 to 3 us each.
    exact_max_candidates: int = 10_000
    # Longest wait for the query's vector; a hybrid search then answers by keywords alone.
    embed_timeout_seconds: float = 2.0
    # For calls without a deadline of their own.
    default_timeout_seconds: float = 10.0
    max_query_characters: int = 4_000
    stop_grace_seconds: float = 10.0

    def __post_init__(self) -> None:
        faults = [
            f"{PREFIX}{name.upper()} must be greater than 0"
            for name in (
                "pool_size",
                "pool_wait_seconds",
                "max_concurrent_calls",
                "embed_timeout_seconds",
                "default_timeout_seconds",
                "max_query_characters",
            )
            if getattr(self, name) <= 0
        ]
        if self.exact_max_candidates < 0 or self.stop_grace_seconds < 0:
            faults.append(f"{PREFIX}EXACT_MAX_CANDIDATES and STOP_GRACE_SECONDS must not be negative")
        if faults:
            raise ValueError("\n".join(faults))
