"""The command line's own rules: columns, languages, usage, exit codes."""

from __future__ import annotations

import asyncio
import json

import pytest
from google.rpc import code_pb2
from readymark.ingest.v1 import ingest_service_pb2 as pb
from readymark_client.cli import main
from readymark_client.cli.arguments import language_of, parse
from readymark_client.cli.printing import cut, display_width, one_line, pad, print_table


def test_chinese_takes_two_columns_and_a_combining_mark_none():
    assert display_width("年假a") == 5
    assert display_width("e\u0301") == 1
    assert pad("年假", 6) == "年假  "


@pytest.mark.parametrize("width", range(1, 12))
def test_a_cut_text_is_never_wider_than_asked(width):
    assert display_width(cut("连接池的默认上限", width)) <= width


def test_content_cannot_drive_the_terminal():
    assert one_line("a\x1b[2Jb\n\tc\u202e") == "a[2Jb c"


def test_columns_stand_below_each_other_whatever_the_script(capsys):
    print_table(("NAME", "SIZE"), [["年假制度", "1"], ["leave", "2"]])
    lines = capsys.readouterr().out.splitlines()
    assert {display_width(line[: line.rindex(line.split()[-1])]) for line in lines} == {10}


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "READYMARK_LANGUAGE": "en"}, "en"),
        ({"LANG": "de_DE", "READYMARK_LANGUAGE": "zh"}, "zh"),
    ],
)
def test_the_language_is_the_readers(environment, language):
    assert language_of(environment) == language


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["submit"],
        ["submit", "a", "b", "--source-key", "k"],
        ["submit", "a", "--metadata", "novalue"],
        ["submit", "a", "--on-duplicate", "maybe"],
        ["submit", "a", "--request-id", "17"],
        ["list", "--status", "HALF"],
        ["get", "x", "--timeout", "0"],
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_service_that_is_not_there_ends_with_3(capsys):
    assert main(["get", "x", "--ingest", "127.0.0.1:1", "--language", "en"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "The ingest service does not answer at 127.0.0.1:1; start it, or give its address with --ingest. "
        "[UNAVAILABLE: SERVICE_UNREACHABLE]\n"
    )


async def test_a_refusal_ends_with_1_and_its_sentence_on_stderr(ingest, refuse, capsys):
    async def get(request, context):
        await refuse(
            context, code_pb2.NOT_FOUND, "RESOURCE_NOT_FOUND", "DOCUMENT_NOT_FOUND", sentence="No x."
        )

    ingest.handlers["GetDocument"] = get
    assert await asyncio.to_thread(main, ["get", "x", "--ingest", ingest.address]) == 1
    assert capsys.readouterr().err == "No x. [RESOURCE_NOT_FOUND: DOCUMENT_NOT_FOUND]\n"


async def test_one_bad_file_does_not_stop_the_others(ingest, refuse, capsys, tmp_path):
    async def upload(frames, context):
        header = (await anext(aiter(frames))).header
        if header.display_name == "bad.txt":
            await refuse(
                context, code_pb2.INVALID_ARGUMENT, "INVALID_DOCUMENT", "EMPTY_DOCUMENT", sentence="Empty."
            )
        async for _ in frames:
            pass
        document = pb.Document(document_id=header.display_name, status=pb.DOCUMENT_STATUS_PENDING)
        return pb.UploadDocumentResponse(document=document, created=True)

    ingest.handlers["UploadDocument"] = upload
    folder = tmp_path / "folder"
    (folder / ".hidden").mkdir(parents=True)
    for name in ("bad.txt", "good.txt", ".hidden/secret.txt", ".dot"):
        (folder / name).write_text("text")
    arguments = ["submit", str(folder), str(tmp_path / "none.txt"), "--json", "--ingest", ingest.address]
    assert await asyncio.to_thread(main, arguments) == 1
    printed = capsys.readouterr()
    results = {result["path"].rsplit("/", 1)[-1]: result for result in json.loads(printed.out)}
    assert set(results) == {"bad.txt", "good.txt", "none.txt"}
    assert results["bad.txt"]["error"]["reason"] == "EMPTY_DOCUMENT"
    assert results["none.txt"]["error"]["reason"] == "FILE_NOT_READABLE"
    assert results["good.txt"]["document"]["status"] == "PENDING"
    assert f"{folder}/bad.txt: Empty. [INVALID_DOCUMENT: EMPTY_DOCUMENT]" in printed.err


def test_common_options_may_stand_before_the_command():
    options = parse(["--language", "zh", "--json", "get", "list"], {})
    assert (options.command, options.language, options.json, options.id) == (
        "get",
        "zh",
        True,
        "list",
    )
