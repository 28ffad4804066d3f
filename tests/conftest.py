"""One PostgreSQL server a session, migrated once; a test's database is a copy of the migrated one."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator

import pytest

# Tests start processes while gRPC threads run; set before anything imports gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from deploy.local.embedded_postgres import INGEST, MIGRATOR, SEARCHER, EmbeddedPostgres
from services.ingest.repository import migrating
from tests.support.databases import Database, running_server

_TEMPLATE = "readymark_template"
_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[EmbeddedPostgres]:
    """A started server of this session."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def template_database(postgres_server: EmbeddedPostgres) -> str:
    """Name of the migrated database that tests copy. Nobody may be connected to it."""
    postgres_server.create_database(_TEMPLATE)
    asyncio.run(migrating.migrate(postgres_server.uri(MIGRATOR, _TEMPLATE)))
    return _TEMPLATE


@pytest.fixture
def database(postgres_server: EmbeddedPostgres, template_database: str) -> Iterator[Database]:
    """A migrated, empty database for one test."""
    name = f"readymark_test_{os.getpid()}_{next(_numbers)}"
    postgres_server.create_database(name, template=template_database)
    try:
        yield Database(
            name=name,
            ingest_url=postgres_server.uri(INGEST, name),
            migrator_url=postgres_server.uri(MIGRATOR, name),
            searcher_url=postgres_server.uri(SEARCHER, name),
            superuser_url=postgres_server.uri("postgres", name),
        )
    finally:
        postgres_server.drop_database(name)
