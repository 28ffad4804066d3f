"""The `readymark` command against the real stack that `readymark up` starts: what users rely on.

One stack for the whole file, on free ports and a folder of its own. Most tests read the
documents that the first fixture submitted; what changes documents makes its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy.local.data_folder import process_lives
from tests.support.files import encrypted_pdf

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLES = REPOSITORY / "deploy" / "local" / "samples"
READY_SECONDS = 180
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Environment = dict[str, str]


def environment(**more: str) -> Environment:
    found = {name: value for name, value in os.environ.items() if not name.startswith("READYMARK_")}
    path = [str(REPOSITORY), str(REPOSITORY / "client"), str(REPOSITORY / "protos" / "generated")]
    models = os.environ.get("READYMARK_MODELS", str(REPOSITORY / ".readymark" / "models"))
    return {
        **found,
        "PYTHONPATH": os.pathsep.join(path),
        "READYMARK_MODELS": models,
        "LANG": "C.UTF-8",
        **more,
    }


def readymark(*arguments: object, env: Environment) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "readymark_client.cli", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


class Stack:
    """A running `readymark up`; `env` reaches it the way a user's shell would."""

    def __init__(self, data: Path, process: subprocess.Popen[str], line: str) -> None:
        self.data = data
        self.process = process
        self.line = line
        self.addresses = dict(word.split("=", 1) for word in line.split()[1:])
        self.env = environment(
            **{
                f"READYMARK_{service.upper()}_ADDRESS": self.addresses[service]
                for service in ("ingest", "embedder", "search")
            }
        )

    def json(self, *arguments: object, code: int = 0):
        done = readymark(*arguments, "--json", env=self.env)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)


def start_stack(data: Path, *arguments: str) -> Stack:
    free = [word for service in ("ingest", "embedder", "search") for word in (f"--{service}-port", "0")]
    process = subprocess.Popen(
        [sys.executable, "-m", "readymark_client.cli", "up", "--data", str(data), *free, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready "):
        process.send_signal(signal.SIGTERM)
        pytest.fail(f"the stack did not start, exit code {process.wait(READY_SECONDS)}")
    return Stack(data, process, line)


@pytest.fixture(scope="module")
def open_folder():
    """A folder outside pytest's own, which it closes to the user that PostgreSQL runs as under root."""
    folder = Path(tempfile.mkdtemp(prefix="readymark-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def stack(open_folder):
    started = start_stack(open_folder / "stack", "--workers", "2")
    yield started
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(120) == 0
    assert not (started.data / "postgres" / "postmaster.pid").exists()


@pytest.fixture(scope="module")
def samples(stack):
    """What `submit --wait --json` says of the samples: file name to result."""
    results = stack.json("submit", SAMPLES, "--wait", "--metadata", "team=ops")
    return {Path(result["path"]).name: result for result in results}


def test_the_ready_line_names_all_that_serves(stack):
    words = stack.line.split()
    assert words[0] == "ready"
    assert [word.split("=")[0] for word in words[1:]] == ["ingest", "embedder", "search", "postgres"]
    assert stack.addresses["postgres"].startswith("postgresql://")


def test_all_samples_become_ready(samples):
    assert {result["document"]["status"] for result in samples.values()} == {"READY"}
    assert all(result["created"] and result["error"] is None for result in samples.values())
    assert all(result["document"]["metadata"] == {"team": "ops"} for result in samples.values())


def test_the_same_bytes_again_return_the_document_that_is_there(stack, samples):
    [again] = stack.json("submit", SAMPLES / "leave-policy.md", "--wait")
    assert again["created"] is False
    assert again["document"]["document_id"] == samples["leave-policy.md"]["document"]["document_id"]


def test_a_refused_duplicate_is_an_error_and_ends_with_1(stack, samples):
    done = readymark("submit", SAMPLES / "leave-policy.md", "--on-duplicate", "reject", env=stack.env)
    assert done.returncode == 1
    assert "[ALREADY_EXISTS: DOCUMENT_EXISTS]" in done.stderr


@pytest.mark.parametrize("mode", ["hybrid", "vector", "keyword"])
@pytest.mark.parametrize(
    ("query", "document"),
    [
        ("How many vacation days do I get?", "leave-policy.md"),
        ("连接池的默认上限是多少？", "connection-pool.zh.txt"),
    ],
)
def test_the_right_document_comes_first(stack, samples, query, document, mode):
    found = stack.json("search", query, "--mode", mode, "--top-k", "3")
    assert found["hits"][0]["display_name"] == document
    assert found["degraded_reasons"] == []
    assert found["applied_mode"] == mode


def test_a_search_can_be_limited_to_a_document(stack, samples):
    only = samples["product-overview.pdf"]["document"]["document_id"]
    found = stack.json("search", "How many vacation days do I get?", "--document", only, "--explain")
    assert {hit["document_id"] for hit in found["hits"]} == {only}
    assert found["hits"][0]["locator"]["page"] >= 1
    assert found["hits"][0]["vector_rank"] == 1


def test_bad_files_fail_with_their_reason_and_the_good_one_goes_on(stack, tmp_path):
    (tmp_path / "locked.pdf").write_bytes(encrypted_pdf("secret"))
    (tmp_path / "empty.md").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 64)
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(2 << 30)
    (tmp_path / "good.md").write_text("# Tea\n\nThe tea kitchen on the third floor opens at seven.\n")
    done = readymark("submit", tmp_path, "--wait", "--json", "--collection", "bad", env=stack.env)
    assert done.returncode == 1
    results = {Path(result["path"]).name: result for result in json.loads(done.stdout)}

    def why(name):
        error = results[name]["error"] or results[name]["document"]["failure"]
        return error["code"], error["reason"]

    assert results["good.md"]["document"]["status"] == "READY"
    assert why("locked.pdf") == ("INVALID_DOCUMENT", "PASSWORD_PROTECTED")
    assert why("empty.md") == ("INVALID_DOCUMENT", "EMPTY_DOCUMENT")
    assert why("binary.txt") == ("INVALID_DOCUMENT", "BINARY_OR_UNKNOWN")
    assert why("huge.txt") == ("INVALID_DOCUMENT", "TOO_LARGE")


def test_sentences_come_in_chinese_for_who_reads_chinese(stack, tmp_path):
    path = tmp_path / "空.md"
    path.write_text("   \n")
    env = {**stack.env, "LANG": "zh_CN.UTF-8"}
    done = readymark("submit", path, "--wait", env=env)
    assert done.returncode == 1
    assert "文件为空或只有空白字符" in done.stdout + done.stderr


def test_get_shows_the_document(stack, samples):
    expected = samples["annual-leave.zh.md"]["document"]
    found = stack.json("get", expected["document_id"])
    assert found["sha256"] == expected["sha256"]
    assert found["searchable"] is True
    text = readymark("get", expected["document_id"], env=stack.env).stdout
    assert "annual-leave.zh.md" in text
    assert "READY" in text


def test_list_finds_all_and_filters_by_status(stack, samples):
    found = stack.json("list", "--collection", "default")
    assert {result["document"]["document_id"] for result in samples.values()} <= {
        document["document_id"] for document in found
    }
    assert {document["status"] for document in stack.json("list", "--status", "ready")} == {"READY"}


def test_watch_gives_one_json_line_an_event(stack, samples):
    ids = [result["document"]["document_id"] for result in samples.values()]
    done = readymark("watch", *ids, "--json", env=stack.env)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert {event["document"]["document_id"] for event in events} == set(ids)


def test_attempts_show_every_stage(stack, samples):
    [attempt] = stack.json("attempts", samples["leave-policy.md"]["document"]["document_id"])
    assert attempt["outcome"] == "SUCCEEDED"
    stages = [timing["stage"] for timing in attempt["stages"]]
    assert stages == ["PARSING", "CHUNKING", "EMBEDDING", "INDEXING"]


def test_chunks_are_there_in_order(stack, samples):
    document = samples["leave-policy.md"]["document"]
    found = stack.json("chunks", document["document_id"])
    assert [chunk["ordinal"] for chunk in found] == list(range(document["chunk_count"]))
    assert "28 vacation days" in "".join(chunk["content"] for chunk in found)


def test_download_gives_the_bytes_back(stack, samples, tmp_path):
    target = tmp_path / "back.pdf"
    document = samples["product-overview.pdf"]["document"]
    written = stack.json("download", document["document_id"], "-o", target)
    assert target.read_bytes() == (SAMPLES / "product-overview.pdf").read_bytes()
    assert written["media_type"] == "application/pdf"


def test_retry_is_refused_for_what_is_ready_and_starts_what_failed(stack, samples, tmp_path):
    ready = samples["leave-policy.md"]["document"]["document_id"]
    refused = readymark("retry", ready, env=stack.env)
    assert refused.returncode == 1
    assert "[CONFLICT: DOCUMENT_NOT_FAILED]" in refused.stderr
    assert refused.stdout == ""
    path = tmp_path / "locked.pdf"
    path.write_bytes(encrypted_pdf("other"))
    done = readymark("submit", path, "--wait", "--json", env=stack.env)
    [failed] = json.loads(done.stdout)
    again = stack.json("retry", failed["document"]["document_id"])
    assert again["status"] == "PENDING"
    assert readymark("watch", again["document_id"], env=stack.env).returncode == 1


def test_cancel_is_refused_for_what_is_ready(stack, samples):
    ready = samples["leave-policy.md"]["document"]["document_id"]
    refused = readymark("cancel", ready, "--json", env=stack.env)
    assert refused.returncode == 1
    assert "[CONFLICT: DOCUMENT_NOT_RUNNING]" in refused.stderr


def test_a_deleted_document_is_gone_from_get_and_search(stack, tmp_path):
    path = tmp_path / "secret-recipe.md"
    path.write_text("# Recipe\n\nThe house lemonade needs exactly nine bergamots.\n")
    [result] = stack.json("submit", path, "--wait", "--collection", "recipes")
    document_id = result["document"]["document_id"]
    question = ("search", "bergamots lemonade", "--collection", "recipes")
    assert len(stack.json(*question)["hits"]) == 1
    assert stack.json("delete", document_id) == {"deleted": document_id}
    assert stack.json(*question)["hits"] == []
    missing = readymark("get", document_id, env=stack.env)
    assert missing.returncode == 1
    assert "[RESOURCE_NOT_FOUND: DOCUMENT_NOT_FOUND]" in missing.stderr
    assert readymark("delete", document_id, env=stack.env).returncode == 1
    assert readymark("delete", document_id, "--allow-missing", env=stack.env).returncode == 0


def test_another_version_under_a_source_key_replaces_what_is_served(stack, tmp_path):
    path = tmp_path / "menu.md"
    submit = ("submit", path, "--source-key", "menu", "--collection", "kitchen", "--wait")
    path.write_text("# Menu\n\nOn Monday there is lentil soup.\n")
    [first] = stack.json(*submit)
    path.write_text("# Menu\n\nOn Monday there is pumpkin risotto.\n")
    [second] = stack.json(*submit)
    assert second["document"]["document_id"] == first["document"]["document_id"]
    assert (second["document"]["version"], second["document"]["served_version"]) == (2, 2)
    hits = stack.json("search", "What is for lunch on Monday?", "--collection", "kitchen")["hits"]
    assert ["risotto" in hit["content"] for hit in hits] == [True]


def test_stats_and_model_say_what_runs(stack, samples):
    assert stack.json("stats")["documents_by_status"]["READY"] >= len(samples)
    assert stack.json("model")["dimension"] == 384


def test_the_doctor_finds_a_healthy_system_healthy(stack, samples):
    found = stack.json("doctor")
    assert found["healthy"] is True
    assert {check["ok"] for check in found["checks"]} == {True}


def test_the_doctor_names_the_service_that_is_away(stack):
    env = {**stack.env, "READYMARK_SEARCH_ADDRESS": "127.0.0.1:1"}
    done = readymark("doctor", "--json", env=env)
    assert done.returncode == 1
    faults = [check for check in json.loads(done.stdout)["checks"] if not check["ok"]]
    assert [check["subject"] for check in faults] == ["search"]
    assert "--search" in faults[0]["advice"]


def test_a_second_stack_on_the_same_folder_is_refused_with_the_address_of_the_first(stack):
    done = readymark("up", "--data", stack.data, env=environment())
    assert done.returncode == 1
    assert stack.addresses["ingest"] in done.stderr
    assert done.stdout == ""


def test_a_taken_port_is_named_with_its_option(stack, tmp_path):
    port = stack.addresses["ingest"].rsplit(":", 1)[1]
    done = readymark("up", "--data", tmp_path / "other", "--ingest-port", port, env=environment())
    assert done.returncode == 1
    assert port in done.stderr
    assert "--ingest-port" in done.stderr


def test_a_worker_that_dies_is_replaced(stack, tmp_path):
    state = json.loads((stack.data / "stack.json").read_text())
    for name in ("worker-1", "worker-2"):
        os.kill(state["pids"][name], signal.SIGKILL)
    path = tmp_path / "after.md"
    path.write_text("# After\n\nThis was submitted while no worker lived.\n")
    [result] = stack.json("submit", path, "--wait", "--collection", "after")
    assert result["document"]["status"] == "READY"


def test_data_survives_and_down_stops_what_detach_started(stack, samples, open_folder):
    data = open_folder / "detached"
    free = [word for service in ("ingest", "embedder", "search") for word in (f"--{service}-port", "0")]
    up = ("up", "--data", data, "--detach", *free)
    first = readymark(*up, env=environment())
    assert first.returncode == 0, first.stderr
    address = dict(word.split("=", 1) for word in first.stdout.split()[1:])["ingest"]
    env = environment(READYMARK_INGEST_ADDRESS=address)
    submitted = readymark("submit", SAMPLES / "leave-policy.md", "--wait", "--json", env=env)
    assert submitted.returncode == 0, submitted.stderr
    pids = json.loads((data / "stack.json").read_text())["pids"]
    assert readymark("down", "--data", data, env=environment()).returncode == 0
    assert [name for name, pid in pids.items() if process_lives(pid)] == []

    second = readymark(*up, env=environment())
    try:
        address = dict(word.split("=", 1) for word in second.stdout.split()[1:])["ingest"]
        listed = readymark("list", "--json", env=environment(READYMARK_INGEST_ADDRESS=address))
        assert [document["status"] for document in json.loads(listed.stdout)] == ["READY"]
    finally:
        assert readymark("down", "--data", data, env=environment()).returncode == 0
    assert readymark("down", "--data", data, env=environment()).returncode == 0


def test_nothing_lingers_after_a_killed_stack_and_the_next_one_takes_over(open_folder):
    killed = start_stack(open_folder / "killed")
    pids = json.loads((killed.data / "stack.json").read_text())["pids"]
    killed.process.kill()
    killed.process.wait()
    # At once: the next one has to wait for the old children and the old PostgreSQL to end.
    second = start_stack(killed.data)
    try:
        assert [name for name, pid in pids.items() if process_lives(pid)] == []
        [result] = second.json("submit", SAMPLES / "annual-leave.zh.md", "--wait")
        assert result["document"]["status"] == "READY"
    finally:
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(120) == 0


def test_a_crashed_postgresql_is_started_again(open_folder):
    crashing = start_stack(open_folder / "crashing")
    try:
        first = json.loads((crashing.data / "stack.json").read_text())["pids"]["postgres"]
        os.kill(first, signal.SIGKILL)
        [result] = crashing.json("submit", SAMPLES / "leave-policy.md", "--wait")
        assert result["document"]["status"] == "READY"
        now = int((crashing.data / "postgres" / "postmaster.pid").read_text().split()[0])
        assert now != first
    finally:
        crashing.process.send_signal(signal.SIGTERM)
        assert crashing.process.wait(120) == 0


def test_the_demo_succeeds_and_the_second_run_finds_the_documents_of_the_first(open_folder):
    command = [sys.executable, "-m", "deploy.local.demo", "--data", str(open_folder / "demo")]
    runs = [
        subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert "was there already" not in runs[0].stdout
    assert runs[1].stdout.count("was there already") == len(list(SAMPLES.iterdir()))
