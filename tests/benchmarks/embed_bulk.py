"""Bulk embedding over gRPC against the limit of the machine.

    python -m tests.benchmarks.embed_bulk [--json] [--texts 80] [--rounds 3]

The limit is ONNX Runtime in this process with nothing around it: the same model, session options
and number of threads, texts tokenised beforehand, and the better of two plans, each text alone or
all texts sorted by length in batches of 512 tokens. Measured in CPU seconds of the process that
computes, which other work on the machine disturbs far less than time; limit and service take turns.
`ratio` is the service's tokens per CPU second over the limit's; the service pays for tokenising
and gRPC in addition. `throughput` is tokens per second of wall time, for what it is worth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from services.embedder.encoder import OnnxEncoder
from services.embedder.model_build import DEFAULT_MODEL, build_model
from services.embedder.model_files import ModelFiles, read_model_files
from services.embedder.settings import allowed_cpus
from services.embedder.tokenizing import InputKind, TextTokenizer, TokenIds
from shared.embedder_client import EmbedderClient, Patience, Vectors

REPOSITORY = Path(__file__).parents[2]
WORDS = [
    "annual",
    "leave",
    "policy",
    "server",
    "index",
    "vector",
    "document",
    "search",
    "employee",
    "request",
    "approval",
    "team",
    "data",
    "system",
    "chapter",
    "section",
    "install",
    "configure",
    "network",
    "storage",
    "report",
    "result",
    "value",
    "measure",
    "年假",
    "有",
    "几天",
    "检索",
    "系统",
    "文档",
    "员工",
    "每年",
    "享有",
    "带薪",
    "数据库",
    "连接池",
    "默认",
    "上限",
]
# What the server may cost beside the model itself.
LEAST_RATIO = 0.97


def make_texts(count: int) -> list[str]:
    """Returns texts of mixed length, median about 60 words, every tenth above 150."""
    rng = random.Random(20)
    lengths = [min(int(rng.lognormvariate(4.1, 0.7)) + 4, 280) for _ in range(count)]
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


def sorted_batches(rows: list[TokenIds], budget: int = 512) -> list[list[TokenIds]]:
    batches: list[list[TokenIds]] = [[]]
    for row in sorted(rows, key=len):
        if batches[-1] and len(row) * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def raw_tokens_per_cpu_second(encoder: OnnxEncoder, batches: list[list[TokenIds]]) -> float:
    tokens = sum(len(row) for batch in batches for row in batch)
    with ThreadPoolExecutor(allowed_cpus()) as threads:
        started_at = time.process_time()
        for _ in threads.map(encoder.encode, batches):
            pass
        return tokens / (time.process_time() - started_at)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def start_server(files: ModelFiles) -> tuple[asyncio.subprocess.Process, str]:
    path = os.pathsep.join(map(str, [REPOSITORY, REPOSITORY / "protos/generated"]))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.embedder",
        cwd=REPOSITORY,
        env={
            "PYTHONPATH": path,
            "READYMARK_EMBEDDER_LISTEN": "127.0.0.1:0",
            "READYMARK_EMBEDDER_MODEL": str(files.folder),
            "READYMARK_LOG_LEVEL": "INFO",
        },
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    event = json.loads(await asyncio.wait_for(process.stderr.readline(), 60))
    assert event["event"] == "serving", event
    # The log has to be read, or the server would one day wait for the pipe.
    asyncio.ensure_future(process.stderr.read())  # noqa: RUF006 - ends with the process
    return process, event["address"]


async def measure(files: ModelFiles, count: int, rounds: int) -> dict[str, object]:
    texts = make_texts(count)
    tokenized = TextTokenizer(files).tokenize(texts, InputKind.DOCUMENT, truncate=False)
    rows = [text.ids for text in tokenized]
    counts = [len(row) for row in rows]
    encoder = OnnxEncoder(files, "cpu")
    expected = np.vstack([encoder.encode([row]) for row in rows[:8]])
    process, address = await start_server(files)
    client = EmbedderClient(address, patience=Patience(calls_in_flight=4))
    plans = {"alone": [[row] for row in rows], "sorted": sorted_batches(rows)}
    limits: dict[str, list[float]] = {plan: [] for plan in plans}
    rates: list[float] = []
    throughputs: list[float] = []
    try:
        fingerprint = (await client.model()).fingerprint
        for _ in range(rounds):
            for plan, batches in plans.items():
                limits[plan].append(await asyncio.to_thread(raw_tokens_per_cpu_second, encoder, batches))
            got: dict[int, Vectors] = {}

            async def keep(start: int, vectors: Vectors, got: dict[int, Vectors] = got) -> None:
                got[start] = vectors

            cpu_before, started_at = cpu_seconds(process.pid), time.monotonic()
            await client.embed_documents(texts, counts, fingerprint, keep)
            throughputs.append(sum(counts) / (time.monotonic() - started_at))
            rates.append(sum(counts) / (cpu_seconds(process.pid) - cpu_before))
            assert np.array_equal(got[0][:8], expected), "the service's vectors differ from the raw ones"
            assert sum(map(len, got.values())) == count
    finally:
        await client.close()
        process.terminate()
        await process.wait()
    limit = max(statistics.median(measured) for measured in limits.values())
    rate = statistics.median(rates)
    return {
        "name": "embed_bulk",
        "ratio": round(rate / limit, 4),
        "limit": LEAST_RATIO,
        "value": round(rate),
        "against": f"raw ONNX Runtime in one process: {limit:.0f} tokens per CPU second",
        "throughput": round(statistics.median(throughputs)),
        "texts": count,
        "tokens": sum(counts),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.embed_bulk")
    parser.add_argument("--json", action="store_true", help="print the result as the last line")
    parser.add_argument("--texts", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    models_dir = Path(os.environ.get("READYMARK_MODELS") or REPOSITORY / ".readymark/models").resolve()
    files = read_model_files(DEFAULT_MODEL, build_model(models_dir, DEFAULT_MODEL))
    result = asyncio.run(measure(files, chosen.texts, chosen.rounds))
    if not chosen.json:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
    else:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
