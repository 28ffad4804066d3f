"""The smaller, English-only model: chosen by one variable, and honest about what it cannot read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from readymark_client import AsyncReadymark

from tests.support.processes import REPOSITORY, Cluster

MODEL = "all-MiniLM-L6-v2"
CHINESE = "连接池的默认上限是三十二个连接。等待连接的请求数连续两分钟大于零时触发告警。" * 3


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_text_the_model_does_not_know_is_ready_with_a_warning_and_found_by_its_words(
    cluster: Cluster, models: Path
) -> None:
    subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-m", "services.embedder.model_build", str(models), "--model", MODEL],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", "client", "protos/generated"])},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    cluster.settings["READYMARK_EMBEDDER_MODEL"] = MODEL
    cluster.embedder()
    cluster.ingest()
    cluster.search()
    cluster.worker()
    addresses = cluster.addresses
    async with AsyncReadymark(addresses["ingest"], addresses["search"], addresses["embedder"]) as client:
        chinese = await client.submit(CHINESE, display_name="pool.zh.txt")
        english = await client.submit(
            "The default limit of the pool is 32 connections.", display_name="pool.txt"
        )
        chinese, english = await client.wait([chinese.document_id, english.document_id], 120)
        assert (str(chinese.status), str(english.status)) == ("READY", "READY")
        assert [warning.reason for warning in chinese.warnings] == ["MODEL_LACKS_LANGUAGE"]
        assert english.warnings == ()
        # The vector of such a query is worth nothing; the words carry the search.
        result = await client.search("连接池的默认上限")
        assert result.hits[0].document_id == chinese.document_id
