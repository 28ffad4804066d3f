"""`python -m services.ingest serve | work | migrate`, configured by the environment only.

serve    the API
work     one worker process
migrate  brings the database up to date, then ends; needs the migrator role
"""

from __future__ import annotations

import asyncio
import os
import sys

from services.ingest.settings import ServeSettings
from services.ingest.work_settings import PREFIX, WorkSettings
from shared import settings, telemetry

USAGE = "usage: python -m services.ingest serve|work|migrate"


def main(arguments: list[str]) -> int:
    # Parsers are forked by a server that is started by fork and exec; gRPC's handlers for forks would
    # only get in the way there. Set before anything imports gRPC.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if arguments not in (["serve"], ["work"], ["migrate"]):
        print(USAGE, file=sys.stderr)  # noqa: T201
        return 2
    (command,) = arguments
    try:
        return _run(command)
    except settings.SettingsError as error:
        print(f"readymark ingest cannot start:\n{error}", file=sys.stderr)  # noqa: T201
        return 2


def _run(command: str) -> int:
    # Imported where they are used: `migrate` needs no parser and `serve` no tokenizer.
    if command == "migrate":
        return _migrate()
    telemetry.configure_logging(f"readymark-ingest-{command}")
    if command == "serve":
        from services.ingest.serving import serve

        serve_settings = settings.from_environment(ServeSettings, PREFIX, os.environ, also_known=WorkSettings)
        return asyncio.run(serve(serve_settings))
    from services.ingest.working import work

    work_settings = settings.from_environment(WorkSettings, PREFIX, os.environ, also_known=ServeSettings)
    return asyncio.run(work(work_settings))


def _migrate() -> int:
    from services.ingest.repository import migrating
    from shared.errors import DependencyUnavailableError
    from shared.postgres import UnsupportedServerError

    telemetry.configure_logging("readymark-ingest-migrate")
    url = os.environ.get(PREFIX + "DATABASE_URL")
    if not url:
        raise settings.SettingsError(f"{PREFIX}DATABASE_URL is not set")
    try:
        applied = asyncio.run(migrating.migrate(url))
    except (UnsupportedServerError, DependencyUnavailableError, migrating.MigrationError) as error:
        print(f"readymark cannot migrate: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"migrations applied: {', '.join(applied) or 'none, the database is up to date'}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
