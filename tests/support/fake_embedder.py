"""A real gRPC EmbedderService without a model, to provoke faults and to save time.

    python -m tests.support.fake_embedder --listen 127.0.0.1:0 [--control FILE] [--calls FILE]

prints one JSON line with the bound address. In the same process use `FakeEmbedder` and
`start_fake_embedder`. A word or CJK character is one token. A text's vector is the sum of fixed
vectors of its words, so texts that share words are near each other.

`--control FILE` holds a JSON object with any of the fields of `Behaviour`; a changed file takes
effect at the next call. `--calls FILE` receives one JSON line for each Embed call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from readymark.embedder.v1 import embedder_service_pb2 as pb
from readymark.embedder.v1 import embedder_service_pb2_grpc as pb_grpc
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from shared import telemetry
from shared.errors import BY_CODE, InvalidArgumentError, ModelMismatchError
from shared.rpc.server import Serving, create_server

SERVICE = pb.DESCRIPTOR.services_by_name["EmbedderService"].full_name
TOKEN = Regex(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]|[^\s\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]+")
SPECIAL_TOKENS = 2
REASONS = {
    "UNAVAILABLE": "EMBEDDER_UNAVAILABLE",
    "OVERLOADED": "EMBEDDER_OVERLOADED",
    "DEADLINE_EXCEEDED": "DEADLINE_EXCEEDED",
    "INVALID_ARGUMENT": "VECTOR_INVALID",
    "INTERNAL": "INTERNAL",
}


@dataclasses.dataclass
class Behaviour:
    """How the fake behaves; may be changed at any time."""

    dimension: int = 384
    fingerprint: str = ""
    """Empty: made from the dimension, so another dimension is another model."""
    max_input_tokens: int = 512
    max_batch_inputs: int = 256
    delay_seconds: float = 0.0
    """Of each Embed call."""
    fail_next: int = 0
    """So many Embed calls fail; counts down."""
    fail_code: str = "UNAVAILABLE"
    """The `code` of shared/errors.py with which they fail."""
    retry_after_seconds: float | None = None
    fail_texts_containing: str = ""
    """Embed calls with such a text fail with `fail_code`, always. Empty: none."""
    is_nan: bool = False
    """Vectors are not a number."""

    @property
    def model_fingerprint(self) -> str:
        return self.fingerprint or hashlib.sha256(f"fake {self.dimension}".encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Call:
    """An Embed call as it arrived."""

    texts: tuple[str, ...]
    kind: str


class FakeEmbedder(pb_grpc.EmbedderServiceServicer):
    """`behaviour` steers it, `calls` lists what it was asked, `gate` holds Embed calls while it is clear."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.calls: list[Call] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.control: Path | None = None
        self.call_log: Path | None = None
        self._control_text = ""
        self._tokenizer = Tokenizer.from_str(fake_tokenizer_json())

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        self._read_control()
        behaviour = self.behaviour
        return pb.GetModelResponse(
            model=pb.Model(
                model_id="fake",
                fingerprint=behaviour.model_fingerprint,
                dimension=behaviour.dimension,
                max_input_tokens=behaviour.max_input_tokens,
                max_batch_inputs=behaviour.max_batch_inputs,
                max_batch_bytes=4 << 20,
                normalized=True,
                pooling="mean",
                execution_providers=["fake"],
                tokenizer_sha256=hashlib.sha256(fake_tokenizer_json().encode()).hexdigest(),
                document_overhead_tokens=SPECIAL_TOKENS,
                unknown_token_id=-1,
            )
        )

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:  # noqa: N802
        self._read_control()
        self._record(request)
        await asyncio.sleep(self.behaviour.delay_seconds)
        await self.gate.wait()
        behaviour = self.behaviour
        self._fail_if_asked(request.inputs)
        self._check_fingerprint(request.expected_fingerprint)
        counts = [len(self._tokenizer.encode(text).ids) for text in request.inputs]
        for index, count in enumerate(counts):
            if count > behaviour.max_input_tokens:
                raise InvalidArgumentError(
                    "INPUT_TOO_LONG", index=index, tokens=count, limit=behaviour.max_input_tokens
                )
        vectors = np.stack([fake_vector(text, behaviour.dimension) for text in request.inputs])
        if behaviour.is_nan:
            vectors[:] = np.nan
        return pb.EmbedResponse(
            fingerprint=behaviour.model_fingerprint,
            dimension=behaviour.dimension,
            vectors=vectors.astype("<f4").tobytes(),
            token_counts=counts,
            truncated=[False] * len(counts),
            unknown_token_counts=[0] * len(counts),
        )

    async def DownloadTokenizer(  # noqa: N802
        self, request: pb.DownloadTokenizerRequest, context: Any
    ) -> AsyncIterator[pb.DownloadTokenizerResponse]:
        self._check_fingerprint(request.expected_fingerprint)
        content = fake_tokenizer_json().encode()
        for start in range(0, len(content), 256):
            yield pb.DownloadTokenizerResponse(data=content[start : start + 256])

    def _check_fingerprint(self, expected: str) -> None:
        actual = self.behaviour.model_fingerprint
        if expected and expected != actual:
            raise ModelMismatchError("EMBEDDING_MODEL_MISMATCH", expected=expected, actual=actual)

    def _fail_if_asked(self, texts: Sequence[str]) -> None:
        behaviour = self.behaviour
        poison = behaviour.fail_texts_containing
        if behaviour.fail_next > 0:
            behaviour.fail_next -= 1
        elif not (poison and any(poison in text for text in texts)):
            return
        error = BY_CODE[behaviour.fail_code]
        raise error(
            REASONS[behaviour.fail_code],
            retry_after_seconds=behaviour.retry_after_seconds,
            index=0,
            trace_id="fake",
        )

    def _record(self, request: pb.EmbedRequest) -> None:
        call = Call(tuple(request.inputs), pb.InputType.Name(request.input_type).removeprefix("INPUT_TYPE_"))
        self.calls.append(call)
        if self.call_log is not None:
            with self.call_log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(call), ensure_ascii=False) + "\n")

    def _read_control(self) -> None:
        if self.control is None or not self.control.exists():
            return
        text = self.control.read_text(encoding="utf-8")
        # A half-written file is read again at the next call.
        with contextlib.suppress(ValueError):
            if text != self._control_text:
                self.behaviour = Behaviour(**json.loads(text))
                self._control_text = text


@functools.cache
def fake_tokenizer_json() -> str:
    """Returns a tokenizer to which every word and every CJK character is one known token."""
    vocabulary = {"<s>": 0, "</s>": 1, "word": 2}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="word"))
    tokenizer.pre_tokenizer = Split(TOKEN, behavior="removed", invert=True)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    text: str = tokenizer.to_str()
    return text


def fake_vector(text: str, dimension: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the unit vector that the fake gives for `text`."""
    split = Split(TOKEN, behavior="removed", invert=True)
    words = [word.lower().strip(".,;:!?()'\"") for word, _ in split.pre_tokenize_str(text)]
    total = sum((_word_vector(word, dimension) for word in words), np.zeros(dimension))
    return np.asarray(total / np.linalg.norm(total), np.float32)


@functools.lru_cache(maxsize=100_000)
def _word_vector(word: str, dimension: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(dimension)


async def start_fake_embedder(
    fake: FakeEmbedder, listen: str = "127.0.0.1:0"
) -> tuple[str, Serving, grpc.aio.Server]:
    """Returns address, what stops it (`await serving.stop(0)`), and the server."""
    server = create_server(service_name="fake-embedder", telemetry=telemetry.setup("fake-embedder"))
    pb_grpc.add_EmbedderServiceServicer_to_server(fake, server)
    serving = Serving(server, listen=listen, service_names=(SERVICE,))
    address = await serving.start()
    serving.set_serving(True)
    return address, serving, server


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_embedder")
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--control", type=Path)
    parser.add_argument("--calls", type=Path)
    arguments = parser.parse_args()
    fake = FakeEmbedder()
    fake.control, fake.call_log = arguments.control, arguments.calls
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    address, serving, _ = await start_fake_embedder(fake, arguments.listen)
    print(json.dumps({"address": address}), flush=True)  # noqa: T201
    await stop.wait()
    await serving.stop(1)


if __name__ == "__main__":
    asyncio.run(_main())
