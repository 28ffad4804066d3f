"""The embedder's settings, read once from READYMARK_EMBEDDER_* by `__main__`.

Also owns how many CPUs this process may use: the affinity mask and the cgroup's quota, never the
number of the host, which a container does not have.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

from shared.settings import setting

PREFIX = "READYMARK_EMBEDDER_"
PROVIDER_NAMES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderSettings:
    """Zero means "by provider" for the batch sizes and "all allowed CPUs" for the workers."""

    listen: str = "127.0.0.1:7402"
    health_listen: str = ""
    model: str = "multilingual-e5-small"
    """A name under `models_dir`, the path of a folder, or a hub id."""
    models_dir: str = setting(".readymark/models", env="READYMARK_MODELS")
    provider: str = "cpu"
    workers: int = 0
    batch_tokens: int = 0
    batch_rows: int = 0
    max_queued_tokens: int = 65_536
    """For each lane. At 2,000 tokens a second on two CPUs the last one waits for half a minute."""
    max_batch_inputs: int = 256
    max_batch_bytes: int = 4 << 20
    stop_grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        faults = []
        if self.provider not in PROVIDER_NAMES:
            faults.append(f"{PREFIX}PROVIDER must be one of {', '.join(PROVIDER_NAMES)}")
        smallest = {
            **dict.fromkeys(("max_queued_tokens", "max_batch_inputs", "max_batch_bytes"), 1),
            **dict.fromkeys(("workers", "batch_tokens", "batch_rows", "stop_grace_seconds"), 0),
        }
        faults += [
            f"{PREFIX}{name.upper()} must be at least {limit}"
            for name, limit in smallest.items()
            if getattr(self, name) < limit
        ]
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def worker_count(self) -> int:
        # A GPU computes one batch at a time; a second worker prepares the next meanwhile.
        return self.workers or (allowed_cpus() if self.provider == "cpu" else 2)

    @property
    def tokens_of_a_batch(self) -> int:
        # CPU: measured, a core is busy from about 100 tokens on, and a short batch is what a query
        # has to wait for.
        return self.batch_tokens or (512 if self.provider == "cpu" else 16_384)

    @property
    def rows_of_a_batch(self) -> int:
        return self.batch_rows or (32 if self.provider == "cpu" else 256)


def allowed_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns how many CPUs this process may use at once, at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(cgroup)
    return max(1, count if quota is None else min(count, math.ceil(quota)))


def _cgroup_quota(cgroup: Path) -> float | None:
    """Returns the CPUs that the cgroup (version 2, else 1) grants, or None when it sets no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    if quota in {"max", "-1"}:
        return None
    return int(quota) / int(period)
