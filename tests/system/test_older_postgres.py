"""PostgreSQL 18 is what we develop on; an older supported release must pass the same tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.databases import VERSION_VARIABLE
from tests.support.processes import REPOSITORY

# The oldest release that the package carries; 15 is the oldest that the code allows.
OLDER = "16"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_job_table_publication_and_search_pass_on_an_older_postgresql() -> None:
    tests = ["tests/ingest/repository", "tests/search/repository", "tests/ingest/test_catalog.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=REPOSITORY,
        env={**os.environ, VERSION_VARIABLE: OLDER},
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
