"""`python -m services.embedder`: the embedder as a process, configured by the environment alone.

Owns start and stop. Serving begins after the warm-up; SIGTERM and SIGINT let running calls finish
and end with status 0; a model that stops computing ends the process with status 1, so that what
supervises it starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from readymark.embedder.v1 import embedder_service_pb2 as pb
from readymark.embedder.v1 import embedder_service_pb2_grpc as pb_grpc
from shared.rpc.server import Serving, create_server

from services.embedder.embedding import TextEmbedder, load_embedder
from services.embedder.model_files import ModelFilesError
from services.embedder.pooling import Vectors
from services.embedder.scheduler import Encode
from services.embedder.servicer import EmbedderServicer
from services.embedder.settings import PREFIX, EmbedderSettings
from services.embedder.tokenizing import TokenIds
from shared import telemetry
from shared.settings import SettingsError, from_environment

SERVICE_NAME = "readymark-embedder"
EMBEDDER_SERVICE = pb.DESCRIPTOR.services_by_name["EmbedderService"].full_name

log = logging.getLogger("services.embedder")


async def serve(settings: EmbedderSettings) -> int:
    """Serves until a signal or a broken model; returns the exit status."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    traces = telemetry.setup(SERVICE_NAME)
    embedder = await asyncio.to_thread(load_embedder, settings, _traced)
    embedder.scheduler.start()
    await embedder.warm_up()
    server = create_server(service_name=SERVICE_NAME, telemetry=traces)
    pb_grpc.add_EmbedderServiceServicer_to_server(EmbedderServicer(embedder), server)
    serving = Serving(
        server,
        listen=settings.listen,
        health_listen=settings.health_listen or None,
        service_names=(EMBEDDER_SERVICE,),
    )
    address = await serving.start()
    serving.set_serving(True)
    _log_serving(address, embedder)
    broken = await _first(stop, embedder.scheduler.broken)
    serving.set_serving(False)
    await serving.stop(settings.stop_grace_seconds)
    await embedder.close()
    traces.shutdown()
    log.info("stopped", extra={"broken": broken})
    return 1 if broken else 0


async def _first(stop: asyncio.Event, broken: asyncio.Event) -> bool:
    """Returns, when one of the two is set, whether it is `broken`."""
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, broken)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return broken.is_set()


def _traced(encode: Encode) -> Encode:
    def encode_in_span(rows: Sequence[TokenIds]) -> Vectors:
        with telemetry.span("encode batch", rows=len(rows), tokens=sum(len(row) for row in rows)):
            return encode(rows)

    return encode_in_span


def _log_serving(address: str, embedder: TextEmbedder) -> None:
    model = embedder.model
    log.info(
        "serving",
        extra={
            "address": address,
            "model_id": model.model_id,
            "fingerprint": model.fingerprint,
            "dimension": model.dimension,
            "providers": ",".join(model.providers),
        },
    )


def main() -> int:
    telemetry.configure_logging(SERVICE_NAME)
    # Parallelism is the scheduler's matter; and transformers says that it misses PyTorch.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return asyncio.run(serve(from_environment(EmbedderSettings, PREFIX, os.environ)))
    except (SettingsError, ModelFilesError) as error:
        log.error("not started", extra={"cause": str(error)})
        return 2


if __name__ == "__main__":
    sys.exit(main())
