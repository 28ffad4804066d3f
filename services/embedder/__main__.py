"""`python -m services.embedder`: the embedder as a process, configured by the environment alone.

Owns start and stop. Serving begins after the warm-up; SIGTERM and SIGINT let running calls finish
and end with status 0; a model that stops computing ends the process with status 1, so that what
supervises it starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from readymark.embedder.v1 import embedder_service_pb2 as pb
from readymark.embedder.v1 import embedder_service_pb2_grpc as pb_grpc

from services.embedder.embedding import TextEmbedder, load_embedder
from services.embedder.model_files import ModelFilesError
from services.embedder.servicer import EmbedderServicer
from services.embedder.settings import PREFIX, EmbedderSettings
from shared import telemetry
from shared.rpc.server import PortTakenError, Serving, create_server, wait_for_signal
from shared.settings import SettingsError, from_environment

SERVICE_NAME = "readymark-embedder"
EMBEDDER_SERVICE = pb.DESCRIPTOR.services_by_name["EmbedderService"].full_name

log = logging.getLogger("services.embedder")


async def serve(settings: EmbedderSettings) -> int:
    """Serves until a signal or a broken model; returns the exit status."""
    signalled = asyncio.ensure_future(wait_for_signal())
    traces = telemetry.setup(SERVICE_NAME)
    embedder = await asyncio.to_thread(load_embedder, settings)
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
    broken = asyncio.ensure_future(embedder.scheduler.broken.wait())
    await asyncio.wait((signalled, broken), return_when=asyncio.FIRST_COMPLETED)
    # NOT_SERVING first, then running calls finish, then the threads that they wait for.
    await serving.stop(settings.stop_grace_seconds)
    await embedder.close()
    traces.shutdown()
    is_broken = broken.done()
    broken.cancel()
    telemetry.log_event(log, "stopped", is_broken=is_broken)
    return 1 if is_broken else 0


def _log_serving(address: str, embedder: TextEmbedder) -> None:
    model = embedder.model
    telemetry.log_event(
        log,
        "serving",
        address=address,
        model_id=model.model_id,
        fingerprint=model.fingerprint,
        dimension=model.dimension,
        providers=model.providers,
    )


def main() -> int:
    telemetry.configure_logging(SERVICE_NAME)
    # Parallelism is the scheduler's matter; and transformers says that it misses PyTorch.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return asyncio.run(serve(from_environment(EmbedderSettings, PREFIX, os.environ)))
    except (SettingsError, ModelFilesError, PortTakenError) as error:
        telemetry.log_event(log, "not started", logging.ERROR, cause=str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
