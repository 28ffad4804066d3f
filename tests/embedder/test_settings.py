from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.embedder.settings import PREFIX, EmbedderSettings, allowed_cpus
from shared.settings import SettingsError, from_environment


def load(**environment: str) -> EmbedderSettings:
    return from_environment(EmbedderSettings, PREFIX, environment)


def test_batches_are_small_on_a_cpu_and_large_on_a_gpu() -> None:
    cpu, cuda = load(), load(READYMARK_EMBEDDER_PROVIDER="cuda")
    assert (cpu.tokens_of_a_batch, cpu.rows_of_a_batch) == (512, 32)
    assert (cuda.tokens_of_a_batch, cuda.worker_count) == (16_384, 2)
    assert load(READYMARK_EMBEDDER_BATCH_TOKENS="256").tokens_of_a_batch == 256


def test_the_address_for_clients_is_no_fault() -> None:
    assert load(READYMARK_EMBEDDER_ADDRESS="127.0.0.1:1", READYMARK_MODELS="m").models_dir == "m"


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        load(READYMARK_EMBEDDER_PROVIDER="tpu", READYMARK_EMBEDDER_WORKERS="-1")
    assert "PROVIDER must be one of cpu, cuda" in str(caught.value)
    assert "WORKERS must be at least 0" in str(caught.value)


@pytest.mark.parametrize(
    ("quota", "expected"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", None)]
)
def test_the_quota_of_the_container_bounds_the_workers(
    tmp_path: Path, quota: str, expected: int | None
) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert allowed_cpus(tmp_path) == (expected or len(os.sched_getaffinity(0)))


def test_the_affinity_mask_bounds_the_workers(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert allowed_cpus(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)
