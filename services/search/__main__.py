"""Runs the search service: `python -m services.search`, configured by the environment alone.

Serves from the start. Until the database can be reached and is migrated, health says
NOT_SERVING and calls are refused as UNAVAILABLE; it goes on trying.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from readymark.search.v1 import search_service_pb2 as messages
from readymark.search.v1 import search_service_pb2_grpc as contract

from services.search.repository import readiness
from services.search.repository.searchable_chunks import SearchableChunks
from services.search.retrieval import Searcher
from services.search.servicer import SearchServicer
from services.search.settings import PREFIX, SearchSettings
from shared import postgres, telemetry
from shared.embedder_client import EmbedderClient
from shared.postgres import UnsupportedServerError
from shared.rpc.server import PortTakenError, Serving, create_server
from shared.settings import SettingsError, describe, from_environment

SERVICE_NAME = "readymark-search"
_CONTRACT_NAME = messages.DESCRIPTOR.services_by_name["SearchService"].full_name
_logger = logging.getLogger("services.search")


async def serve(settings: SearchSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set; raises UnsupportedServerError when the database is too old."""
    tracing = telemetry.setup(SERVICE_NAME)
    pool = postgres.create_pool(
        settings.database_url,
        application_name=SERVICE_NAME,
        max_size=settings.pool_size,
        timeout_seconds=settings.pool_wait_seconds,
    )
    embedder = EmbedderClient(settings.embedder_address)
    serving = _serving(settings, pool, embedder, tracing)
    address = await serving.start()
    telemetry.log_event(_logger, "serving", address=address, **describe(settings))
    getting_ready = asyncio.create_task(_get_ready(settings, pool, serving))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({getting_ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if getting_ready.done():
            # Raises what made the database unusable for good.
            getting_ready.result()
            await stopping
    finally:
        getting_ready.cancel()
        stopping.cancel()
        await serving.stop(settings.stop_grace_seconds)
        await embedder.close()
        await pool.close()
        tracing.shutdown()
        telemetry.log_event(_logger, "stopped")


def _serving(
    settings: SearchSettings, pool: postgres.Pool, embedder: EmbedderClient, tracing: telemetry.Telemetry
) -> Serving:
    searcher = Searcher(
        SearchableChunks(pool),
        embedder,
        exact_max_candidates=settings.exact_max_candidates,
        embed_timeout_seconds=settings.embed_timeout_seconds,
    )
    servicer = SearchServicer(
        searcher,
        default_timeout_seconds=settings.default_timeout_seconds,
        max_query_characters=settings.max_query_characters,
    )
    server = create_server(
        service_name=SERVICE_NAME,
        telemetry=tracing,
        max_concurrent_rpcs=settings.max_concurrent_calls,
    )
    contract.add_SearchServiceServicer_to_server(servicer, server)
    return Serving(
        server,
        listen=settings.listen,
        health_listen=settings.health_listen or None,
        service_names=(_CONTRACT_NAME,),
    )


async def _get_ready(settings: SearchSettings, pool: postgres.Pool, serving: Serving) -> None:
    await readiness.wait_for_database(settings.database_url, application_name=SERVICE_NAME)
    await pool.open()
    serving.set_serving(True)
    telemetry.log_event(_logger, "database ready")


async def _main(settings: SearchSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)


def main() -> int:
    telemetry.configure_logging(SERVICE_NAME)
    try:
        settings = from_environment(SearchSettings, PREFIX, os.environ)
        asyncio.run(_main(settings))
    except (SettingsError, PortTakenError, UnsupportedServerError) as error:
        for fault in str(error).splitlines():
            telemetry.log_event(_logger, "cannot start", logging.ERROR, problem=fault)
        return 2 if isinstance(error, SettingsError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
