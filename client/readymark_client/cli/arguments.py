"""The arguments of every command, their defaults from the environment, and the help texts.

Owns what a command line means. Runs nothing; the commands' functions are only named here.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from readymark_client.asynchronous import (
    DEFAULT_COLLECTION,
    DEFAULT_EMBEDDER,
    DEFAULT_INGEST,
    DEFAULT_SEARCH,
)
from readymark_client.cli import doctor, documents, searching, submitting
from readymark_client.connection import DEFAULT_TIMEOUT_SECONDS, client_version
from readymark_client.synchronous import Readymark
from readymark_client.values import DocumentStatus

EPILOG = """\
exit codes: 0 ok, 1 a document failed or a service refused, 2 usage, 3 a service is not reachable
environment: READYMARK_INGEST_ADDRESS, READYMARK_EMBEDDER_ADDRESS, READYMARK_SEARCH_ADDRESS,
             READYMARK_LANGUAGE (en or zh)
"""


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    """Returns the parsed line, the command's function as `run`; usage errors exit with 2."""
    parser, commands = _parser(environment)
    return parser.parse_args(_command_first(list(arguments), commands))


def _command_first(words: list[str], commands: Collection[str]) -> list[str]:
    """Common options may stand before the command, too: `readymark --language zh get ID`."""
    for position, word in enumerate(words):
        if word in commands:
            return [word, *words[:position], *words[position + 1 :]]
    return words


def language_of(environment: Mapping[str, str]) -> str:
    """Returns "zh" when READYMARK_LANGUAGE, or without it the locale, is Chinese; else "en"."""
    named = environment.get("READYMARK_LANGUAGE")
    if not named:
        named = environment.get("LC_ALL") or environment.get("LC_MESSAGES") or environment.get("LANG") or ""
    return "zh" if named.lower().startswith("zh") else "en"


def _parser(environment: Mapping[str, str]) -> tuple[argparse.ArgumentParser, Collection[str]]:
    parser = argparse.ArgumentParser(
        prog="readymark",
        description="Submit documents, follow them to READY, search them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"readymark {client_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = _shared(environment)
    _add_stack_commands(commands)
    _add_submit(commands, shared)
    _add_document_commands(commands, shared)
    _add_list_commands(commands, shared)
    _add_search_commands(commands, shared)
    return parser, commands.choices


def _shared(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    group = shared.add_argument_group("common options")
    for service, default in (
        ("ingest", DEFAULT_INGEST),
        ("embedder", DEFAULT_EMBEDDER),
        ("search", DEFAULT_SEARCH),
    ):
        found = environment.get(f"READYMARK_{service.upper()}_ADDRESS") or default
        group.add_argument(
            f"--{service}",
            metavar="HOST:PORT",
            default=found,
            help="(%(default)s)",
        )
    group.add_argument("--json", action="store_true", help="print JSON instead of text")
    group.add_argument(
        "--language",
        choices=("en", "zh"),
        default=language_of(environment),
        help="(%(default)s)",
    )
    group.add_argument(
        "--timeout",
        type=_positive_seconds,
        metavar="SECONDS",
        default=DEFAULT_TIMEOUT_SECONDS,
        help="for one call (%(default)g)",
    )
    group.add_argument("--quiet", "-q", action="store_true", help="no progress")
    return shared


def _add_stack_commands(commands: Any) -> None:
    # For the list of commands only: `main` hands both over before anything is parsed.
    commands.add_parser("up", help="run the whole system on this machine")
    commands.add_parser("down", help="stop what `up` started")


def _command(
    commands: Any,
    name: str,
    shared: argparse.ArgumentParser,
    run: Callable[[Readymark, argparse.Namespace], int],
    summary: str,
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, parents=[shared], help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    command.set_defaults(run=run)
    return command


def _add_submit(commands: Any, shared: argparse.ArgumentParser) -> None:
    submit = _command(commands, "submit", shared, submitting.submit, "submit files and folders")
    submit.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a folder that is walked")
    submit.add_argument("--collection", default=DEFAULT_COLLECTION)
    submit.add_argument("--source-key", default="", help="your own name for the document; one PATH only")
    submit.add_argument(
        "--metadata", action="append", default=[], type=_pair, metavar="KEY=VALUE", help="may be repeated"
    )
    submit.add_argument(
        "--on-duplicate",
        choices=("reject", "return", "replace", "keep"),
        default="default",
        metavar="POLICY",
        help="reject, return, replace or keep; default: equal bytes return the existing document",
    )
    submit.add_argument(
        "--request-id", type=_uuid, help="UUID that makes a repeated call safe; one PATH only"
    )
    submit.add_argument("--wait", action="store_true", help="until every document is READY or FAILED")
    submit.add_argument(
        "--wait-timeout", type=_positive_seconds, default=3600.0, metavar="SECONDS", help="(%(default)g)"
    )
    submit.set_defaults(usage=submit.error)


def _add_document_commands(commands: Any, shared: argparse.ArgumentParser) -> None:
    for name, run, summary in (
        ("get", documents.get, "show one document"),
        ("retry", documents.retry, "start a FAILED document again"),
        ("cancel", documents.cancel, "end a waiting or running document"),
        ("attempts", documents.attempts, "show the attempts of a document, newest first"),
    ):
        _command(commands, name, shared, run, summary).add_argument("id", metavar="ID")
    delete = _command(commands, "delete", shared, documents.delete, "delete a document")
    delete.add_argument("id", metavar="ID")
    delete.add_argument("--allow-missing", action="store_true", help="do not fail when there is none")
    chunks = _command(commands, "chunks", shared, documents.chunks, "show the chunks of a document")
    chunks.add_argument("id", metavar="ID")
    chunks.add_argument("--document-version", type=int, default=0, metavar="N", help="default: the newest")
    download = _command(commands, "download", shared, documents.download, "write the original file")
    download.add_argument("id", metavar="ID")
    download.add_argument("--output", "-o", required=True, metavar="PATH")
    download.add_argument("--asset", default="", metavar="ASSET_ID", help="an asset instead of the original")


def _add_list_commands(commands: Any, shared: argparse.ArgumentParser) -> None:
    listing = _command(commands, "list", shared, documents.list_documents, "list documents, newest first")
    listing.add_argument("--collection", default=None, help="default: all")
    listing.add_argument(
        "--status",
        choices=[status.value for status in DocumentStatus if status is not DocumentStatus.UNKNOWN],
        type=str.upper,
        default=None,
    )
    listing.add_argument("--limit", type=int, default=1000, metavar="N", help="(%(default)d)")
    watch = _command(commands, "watch", shared, documents.watch, "follow documents as they change")
    watch.add_argument("ids", nargs="*", metavar="ID", help="none: every document of the collection")
    watch.add_argument("--collection", default=DEFAULT_COLLECTION)
    watch.add_argument("--forever", action="store_true", help="go on when all are READY or FAILED")
    stats = _command(commands, "stats", shared, documents.stats, "show queue and throughput")
    stats.add_argument("--collection", default=None, help="default: all")


def _add_search_commands(commands: Any, shared: argparse.ArgumentParser) -> None:
    search = _command(commands, "search", shared, searching.search, "search the READY documents")
    search.add_argument("query", metavar="QUERY")
    search.add_argument("--collection", default=DEFAULT_COLLECTION)
    search.add_argument("--top-k", type=int, default=10, metavar="N", help="hits wanted (%(default)d)")
    search.add_argument("--mode", choices=("hybrid", "vector", "keyword"), default="hybrid")
    search.add_argument(
        "--document", action="append", default=[], metavar="ID", help="only these; may be repeated"
    )
    search.add_argument("--explain", action="store_true", help="rank and score of each channel")
    _command(commands, "model", shared, searching.model, "show the embedding model")
    _command(commands, "doctor", shared, doctor.doctor, "check every service and say what to do")


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _uuid(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a UUID") from None


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
