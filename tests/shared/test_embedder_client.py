"""The client against a real gRPC server whose faults are asked for."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from opentelemetry import trace

from shared import telemetry
from shared.embedder_client import EmbedderClient, Patience, Vectors
from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    InvalidArgumentError,
    ModelMismatchError,
    OverloadedError,
)
from tests.support.fake_embedder import (
    Behaviour,
    FakeEmbedder,
    fake_tokenizer_json,
    fake_vector,
    start_fake_embedder,
)

REPOSITORY = Path(__file__).parents[2]
QUICK = Patience(retry_budget_seconds=5, first_backoff_seconds=0.01, max_backoff_seconds=0.02)
FINGERPRINT = Behaviour().model_fingerprint


@pytest.fixture
def fake() -> FakeEmbedder:
    return FakeEmbedder()


@pytest.fixture
async def address(fake: FakeEmbedder) -> AsyncIterator[str]:
    address, serving, _ = await start_fake_embedder(fake)
    yield address
    await serving.stop(0)


@pytest.fixture
async def client(address: str) -> AsyncIterator[EmbedderClient]:
    client = EmbedderClient(address, patience=QUICK)
    yield client
    await client.close()


class Stored:
    """Stands where the database stands: keeps batches by their start."""

    def __init__(self) -> None:
        self.batches: dict[int, Vectors] = {}
        self.running = 0

    async def __call__(self, start: int, vectors: Vectors) -> None:
        self.running += 1
        assert self.running == 1, "two batches are being stored at once"
        await asyncio.sleep(0.02)
        self.batches[start] = vectors
        self.running -= 1

    def vectors(self) -> np.ndarray:
        return np.concatenate([self.batches[start] for start in sorted(self.batches)])


def documents(count: int) -> list[str]:
    return [f"document number {number} about leave" for number in range(count)]


async def embed_all(client: EmbedderClient, texts: list[str], tokens: int = 7) -> Stored:
    stored = Stored()
    await client.embed_documents(texts, [tokens] * len(texts), FINGERPRINT, stored)
    return stored


def expected(texts: list[str]) -> np.ndarray:
    return np.stack([fake_vector(text, 384) for text in texts])


async def test_the_model_is_asked_once_until_it_is_refreshed(
    client: EmbedderClient, fake: FakeEmbedder
) -> None:
    first, second = await asyncio.gather(client.model(), client.model())
    assert first is second
    assert (first.dimension, first.fingerprint, first.unknown_token_id) == (384, FINGERPRINT, None)
    fake.behaviour.dimension = 8
    assert await client.model() is first
    assert (await client.refresh_model()).dimension == 8
    assert (await client.model()).dimension == 8


async def test_a_call_gives_vectors_and_counts_in_order(client: EmbedderClient) -> None:
    texts = ["annual leave", "年假 policy"]
    result = await client.embed(texts, "QUERY", FINGERPRINT, 10)
    assert np.array_equal(result.vectors, expected(texts))
    assert (result.vectors.dtype, result.token_counts) == (np.float32, (4, 5))
    assert result.unknown_token_counts == (0, 0)


async def test_the_kind_reaches_the_embedder(client: EmbedderClient, fake: FakeEmbedder) -> None:
    await client.embed(["a"], "QUERY", FINGERPRINT, 10)
    await client.embed(["a"], "DOCUMENT", FINGERPRINT, 10)
    assert [call.kind for call in fake.calls] == ["QUERY", "DOCUMENT"]


async def test_the_tokenizer_is_checked_and_counts_every_word(
    client: EmbedderClient, fake: FakeEmbedder
) -> None:
    content = await client.tokenizer_bytes(FINGERPRINT)
    assert content.decode() == fake_tokenizer_json()
    assert hashlib.sha256(content).hexdigest() == (await client.model()).tokenizer_sha256
    with pytest.raises(ModelMismatchError):
        await client.tokenizer_bytes("0" * 64)


async def test_another_model_is_noticed_and_named(client: EmbedderClient, fake: FakeEmbedder) -> None:
    await client.model()
    fake.behaviour.fingerprint = "f" * 64
    with pytest.raises(ModelMismatchError) as caught:
        await client.embed(["a"], "QUERY", FINGERPRINT, 10)
    assert caught.value.parameters == {"expected": FINGERPRINT, "actual": "f" * 64}
    assert (await client.model()).fingerprint == "f" * 64, "the cached model was dropped"


async def test_a_call_is_tried_once(client: EmbedderClient, fake: FakeEmbedder) -> None:
    fake.behaviour = Behaviour(fail_next=1, fail_code="OVERLOADED", retry_after_seconds=1.5)
    with pytest.raises(OverloadedError) as caught:
        await client.embed(["a"], "QUERY", FINGERPRINT, 10)
    assert caught.value.retry_after_seconds == pytest.approx(1.5)
    assert len(fake.calls) == 1


async def test_a_call_ends_with_its_deadline(client: EmbedderClient, fake: FakeEmbedder) -> None:
    fake.gate.clear()
    with pytest.raises(DeadlineExceededError):
        await client.embed(["a"], "QUERY", FINGERPRINT, 0.1)


async def test_vectors_that_are_not_a_number_are_never_handed_on(
    client: EmbedderClient, fake: FakeEmbedder
) -> None:
    fake.behaviour.is_nan = True
    with pytest.raises(DependencyUnavailableError):
        await client.embed(["a"], "QUERY", FINGERPRINT, 10)


async def test_documents_arrive_completely_in_batches_of_texts(
    client: EmbedderClient, fake: FakeEmbedder
) -> None:
    texts = documents(150)
    stored = await embed_all(client, texts)
    assert sorted(stored.batches) == [0, 64, 128]
    assert np.array_equal(stored.vectors(), expected(texts))
    assert {call.kind for call in fake.calls} == {"DOCUMENT"}


async def test_a_batch_holds_no_more_tokens_than_allowed(client: EmbedderClient, fake: FakeEmbedder) -> None:
    stored = await embed_all(client, documents(20), tokens=500)
    assert [len(stored.batches[start]) for start in sorted(stored.batches)] == [8, 8, 4]


async def test_the_embedders_own_limit_of_a_call_is_kept(client: EmbedderClient, fake: FakeEmbedder) -> None:
    fake.behaviour.max_batch_inputs = 10
    await embed_all(client, documents(25))
    assert sorted(len(call.texts) for call in fake.calls) == [5, 10, 10]


async def test_two_calls_are_in_flight_and_no_more(client: EmbedderClient, fake: FakeEmbedder) -> None:
    fake.gate.clear()
    running = asyncio.ensure_future(embed_all(client, documents(400)))
    for _ in range(400):
        if len(fake.calls) >= 2:
            break
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert len(fake.calls) == 2
    fake.gate.set()
    assert len((await running).vectors()) == 400


@pytest.mark.parametrize("code", ["UNAVAILABLE", "OVERLOADED"])
async def test_an_embedder_that_is_away_or_busy_for_a_while_costs_nothing_but_time(
    client: EmbedderClient, fake: FakeEmbedder, code: str
) -> None:
    fake.behaviour = Behaviour(fail_next=3, fail_code=code, retry_after_seconds=0.01)
    texts = documents(100)
    stored = await embed_all(client, texts)
    assert np.array_equal(stored.vectors(), expected(texts))
    assert len(fake.calls) == 2 + 3


async def test_patience_ends_with_the_embedder_named_as_unavailable(address: str, fake: FakeEmbedder) -> None:
    fake.behaviour = Behaviour(fail_next=10_000, fail_code="OVERLOADED", retry_after_seconds=0.05)
    patience = Patience(retry_budget_seconds=0.3, max_backoff_seconds=0.001)
    client = EmbedderClient(address, patience=patience)
    with pytest.raises(DependencyUnavailableError) as caught:
        await embed_all(client, documents(3))
    assert caught.value.reason == "EMBEDDER_UNAVAILABLE"
    assert 2 <= len(fake.calls) <= 7, "the push-back was waited for"
    await client.close()


async def test_an_embedder_that_is_not_there_is_unavailable() -> None:
    client = EmbedderClient("127.0.0.1:1", patience=Patience(retry_budget_seconds=0.2))
    with pytest.raises(DependencyUnavailableError):
        await embed_all(client, documents(1))
    await client.close()


async def test_a_batch_that_misses_its_deadline_is_halved_until_it_fits(
    client: EmbedderClient, fake: FakeEmbedder
) -> None:
    fake.behaviour = Behaviour(fail_next=2, fail_code="DEADLINE_EXCEEDED")
    texts = documents(8)
    stored = await embed_all(client, texts)
    assert [len(call.texts) for call in fake.calls] == [8, 4, 2, 2, 4]
    assert np.array_equal(stored.vectors(), expected(texts))


async def test_a_bad_text_ends_the_work_at_once_with_its_own_error(
    client: EmbedderClient, fake: FakeEmbedder
) -> None:
    fake.behaviour = Behaviour(fail_texts_containing="number 70 ", fail_code="INVALID_ARGUMENT")
    with pytest.raises(InvalidArgumentError) as caught:
        await embed_all(client, documents(150))
    assert caught.value.reason == "VECTOR_INVALID"


async def test_an_error_of_the_store_comes_out_unchanged(client: EmbedderClient) -> None:
    async def fail(start: int, vectors: Vectors) -> None:
        raise LookupError(start)

    with pytest.raises(LookupError):
        await client.embed_documents(documents(200), [7] * 200, FINGERPRINT, fail)


async def test_a_deadline_grows_with_the_tokens() -> None:
    assert Patience().timeout_seconds(4096) == pytest.approx(30 + 4096 / 50)


async def test_the_callers_trace_reaches_the_embedder(
    client: EmbedderClient, fake: FakeEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    record = fake._record
    monkeypatch.setattr(
        fake,
        "_record",
        lambda request: (
            seen.append(trace.get_current_span().get_span_context().trace_id),
            record(request),
        ),
    )
    with telemetry.span("search") as span:
        await client.embed(["a"], "QUERY", FINGERPRINT, 10)
    assert seen == [span.get_span_context().trace_id]


async def test_the_fake_as_a_process_obeys_its_control_file(tmp_path: Path) -> None:
    control, calls = tmp_path / "control.json", tmp_path / "calls.jsonl"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.fake_embedder",
        "--control",
        str(control),
        "--calls",
        str(calls),
        cwd=REPOSITORY,
        env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'protos/generated'}"},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    address = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))["address"]
    client = EmbedderClient(address, patience=QUICK)
    control.write_text('{"fail_next": 1}')
    with pytest.raises(DependencyUnavailableError):
        await client.embed(["one"], "QUERY", FINGERPRINT, 10)
    await client.embed(["two"], "QUERY", FINGERPRINT, 10)
    assert [json.loads(line)["texts"] for line in calls.read_text().splitlines()] == [["one"], ["two"]]
    await client.close()
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0
