"""Nothing that a document does to its parser reaches the worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.ingest.model import ParsedDocument
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.results import asset_path
from services.ingest.parsing.sandbox import ParserPool
from shared.errors import DependencyUnavailableError, InvalidDocumentError
from tests.support import files

MISBEHAVING = "tests.support.misbehaving_parsers:"


@contextlib.asynccontextmanager
async def pool_of(parser: str | None = None, processes: int = 2) -> AsyncIterator[ParserPool]:
    pool = (
        ParserPool(max_processes=processes, parser=MISBEHAVING + parser)
        if parser
        else ParserPool(max_processes=processes)
    )
    try:
        yield pool
    finally:
        await pool.close()


async def parse(
    pool: ParserPool,
    folder: Path,
    data: bytes = b"# Title\n\nwords",
    name: str = "a.md",
    limits: ParseLimits | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ParsedDocument:
    path = folder / f"source-{time.monotonic_ns()}"
    path.write_bytes(data)
    return await pool.parse(
        path,
        folder / f"output-{time.monotonic_ns()}",
        display_name=name,
        declared_media_type=None,
        limits=limits or ParseLimits(),
        on_progress=on_progress,
    )


async def failure(
    parser: str, folder: Path, limits: ParseLimits | None = None
) -> InvalidDocumentError | DependencyUnavailableError:
    async with pool_of(parser) as pool:
        with pytest.raises((InvalidDocumentError, DependencyUnavailableError)) as caught:
            await parse(pool, folder, limits=limits)
    return caught.value


def is_running(pid: int) -> bool:
    """A zombie has ended, whoever is late to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while is_running(pid):
            await asyncio.sleep(0.01)


async def test_a_document_is_parsed_with_its_progress_and_assets(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    pages = [None, *[files.lines([f"Text of page {number} here."]) for number in range(2, 42)]]
    async with pool_of() as pool:
        document = await pool.parse(
            _written(tmp_path / "source", files.scanned_pdf(pages)),
            tmp_path / "output",
            display_name="a.pdf",
            declared_media_type="application/pdf",
            limits=ParseLimits(),
            on_progress=lambda done, total: seen.append((done, total)),
        )
    assert document.page_count == 41
    assert seen == [(20, 41), (40, 41), (41, 41)]
    (asset,) = document.assets
    assert asset_path(tmp_path / "output", asset.sha256).stat().st_size == asset.size_bytes


async def test_a_refused_document_keeps_its_reason_and_facts(tmp_path: Path) -> None:
    async with pool_of() as pool:
        with pytest.raises(InvalidDocumentError) as caught:
            await parse(pool, tmp_path, files.encrypted_pdf())
    assert (caught.value.reason, caught.value.parameters) == ("PASSWORD_PROTECTED", {"file_type": "PDF"})


async def test_a_parser_that_spins_is_stopped_by_the_clock(tmp_path: Path) -> None:
    started = time.monotonic()
    error = await failure("spin", tmp_path, ParseLimits(wall_seconds=0.5))
    assert (error.reason, error.parameters["limit"]) == ("PARSE_TIMEOUT", "0.5")
    assert time.monotonic() - started < 15


async def test_a_parser_that_spins_is_stopped_by_its_processor_time(tmp_path: Path) -> None:
    error = await failure("spin", tmp_path, ParseLimits(cpu_seconds=1))
    assert (error.reason, error.parameters["limit"]) == ("PARSE_TIMEOUT", "1")


@pytest.mark.parametrize("parser", ["allocate", "abort_on_allocation"])
async def test_a_parser_that_eats_memory_is_refused_it(parser: str, tmp_path: Path) -> None:
    error = await failure(parser, tmp_path, ParseLimits(memory_bytes=640 << 20))
    assert error.reason == "PARSE_MEMORY"


@pytest.mark.parametrize(
    "parser",
    [
        "segfault",
        "recurse",
        "leave_no_result",
        "lie_about_an_asset",
        "escape_by_an_asset_name",
        "overlap_blocks",
        "babble",
    ],
)
async def test_a_crash_or_a_lie_is_the_document_s_fault(parser: str, tmp_path: Path) -> None:
    assert (await failure(parser, tmp_path, ParseLimits(wall_seconds=30))).reason == "PARSE_CRASH"


async def test_a_result_over_the_limit_is_not_read(tmp_path: Path) -> None:
    limits = ParseLimits(max_result_bytes=1 << 20, max_asset_bytes=1 << 20)
    assert (await failure("write_huge_result", tmp_path, limits)).reason == "TOO_MUCH_TEXT"


@pytest.mark.parametrize("parser", ["be_killed", "full_disk"])
async def test_a_fault_of_the_machine_is_temporary(parser: str, tmp_path: Path) -> None:
    error = await failure(parser, tmp_path)
    assert isinstance(error, DependencyUnavailableError)
    assert error.reason == "PARSER_UNAVAILABLE"


async def test_the_process_has_no_network_no_exec_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READYMARK_INGEST_DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with pool_of("look_around") as pool:
        document = await parse(pool, tmp_path)
    assert document.text.split("\n") == [
        "socket AF_INET refused",
        "socket AF_INET6 refused",
        "socket AF_UNIX refused",
        "exec refused",
        "kill refused",
        "threads work",
        "core 0",
        "files 64",
        # Input, output and errors lead nowhere; 3 is the pipe, 4 the folder that is being listed.
        "descriptors 0 1 2 3 4",
        "secrets ",
        "modules ",
    ]


async def test_cancellation_kills_the_parser_at_once(tmp_path: Path) -> None:
    pids: list[int] = []
    async with pool_of("sleep") as pool:
        started = asyncio.Event()

        def note(pid: int, _: int) -> None:
            pids.append(pid)
            started.set()

        task = asyncio.create_task(parse(pool, tmp_path, on_progress=note))
        await started.wait()
        assert is_running(pids[0])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_running(pids[0])


async def test_closing_the_pool_leaves_no_process(tmp_path: Path) -> None:
    pids: list[int] = []
    async with pool_of("sleep") as pool:
        started = asyncio.Event()

        def note(pid: int, server_pid: int) -> None:
            pids.extend((pid, server_pid))
            started.set()

        task = asyncio.create_task(parse(pool, tmp_path, on_progress=note))
        await started.wait()
        await pool.close()
        with pytest.raises(DependencyUnavailableError):
            await task
        assert not any(is_running(pid) for pid in pids)
        with pytest.raises(DependencyUnavailableError) as caught:
            await parse(pool, tmp_path)
        assert caught.value.reason == "SHUTTING_DOWN"


async def test_a_fork_server_that_is_killed_costs_one_attempt_and_comes_back(tmp_path: Path) -> None:
    pids: list[int] = []
    async with pool_of("sleep") as pool:
        for _ in range(2):
            started = asyncio.Event()

            def note(pid: int, server_pid: int, started: asyncio.Event = started) -> None:
                pids.extend((pid, server_pid))
                started.set()

            task = asyncio.create_task(parse(pool, tmp_path, on_progress=note))
            await started.wait()
            os.kill(pids[-1], signal.SIGKILL)
            with pytest.raises(DependencyUnavailableError) as caught:
                await task
            assert caught.value.reason == "PARSER_UNAVAILABLE"
            await until_gone(pids[-2])
    assert len(set(pids)) == 4


async def test_a_worker_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """It runs as a main module, as `python -m services.ingest work` does, and has forked a process
    of its own that holds a copy of every socket."""
    (tmp_path / "source").write_bytes(b"words")
    script = f"""
import asyncio, os, pathlib, time
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.sandbox import ParserPool
print("main", flush=True)
def note(pid, server):
    other = os.fork()
    if other == 0:
        time.sleep(60)  # why: it only has to outlive the worker
        os._exit(0)
    print(pid, server, other, flush=True)
async def main():
    folder = pathlib.Path({str(tmp_path)!r})
    pool = ParserPool(parser="{MISBEHAVING}sleep")
    await pool.parse(folder / "source", folder / "output", display_name="a", declared_media_type=None,
        limits=ParseLimits(), on_progress=note)
asyncio.run(main())
"""
    (tmp_path / "pretended_worker.py").write_text(script)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "pretended_worker"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as worker:  # noqa: ASYNC220
        assert worker.stdout is not None
        assert await asyncio.to_thread(worker.stdout.readline) == b"main\n"
        pids = [int(word) for word in (await asyncio.to_thread(worker.stdout.readline)).split()]
        assert len(pids) == 3 and all(map(is_running, pids))
        worker.kill()
        try:
            for pid in pids[:2]:
                await until_gone(pid)
            assert is_running(pids[2])
        finally:
            os.kill(pids[2], signal.SIGKILL)


async def test_a_flate_bomb_ends_alone_while_another_document_is_read(tmp_path: Path) -> None:
    bomb = files.flate_bomb_pdf(400)
    assert len(bomb) < 1 << 20
    async with pool_of() as pool:
        await parse(pool, tmp_path)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        limits = ParseLimits(memory_bytes=640 << 20)
        results = await asyncio.gather(
            parse(pool, tmp_path, bomb, limits=limits), parse(pool, tmp_path), return_exceptions=True
        )
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert isinstance(results[0], InvalidDocumentError)
    assert results[0].reason == "PARSE_MEMORY"
    assert isinstance(results[1], ParsedDocument)
    assert grown_kib < 32 * 1024


async def test_no_more_parsers_run_than_there_are_slots(tmp_path: Path) -> None:
    pids: list[int] = []
    async with pool_of("sleep", processes=1) as pool:
        started = asyncio.Event()

        def note(pid: int, _: int) -> None:
            pids.append(pid)
            started.set()

        first = asyncio.create_task(parse(pool, tmp_path, on_progress=note))
        second = asyncio.create_task(parse(pool, tmp_path, on_progress=note))
        await started.wait()
        started.clear()
        first.cancel()
        await asyncio.wait({first})
        assert len(pids) == 1
        await started.wait()
        assert len(pids) == 2
        second.cancel()
        await asyncio.wait({second})


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
