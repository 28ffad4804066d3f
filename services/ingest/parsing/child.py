"""The life of one parser process: confine itself, parse one document, leave the result, end.

Owns the lines that it writes to its pipe; sandbox.py reads them. One line a message:
`progress DONE TOTAL`, `unconfined`, then one of `done` or `error {json}`.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from services.ingest.parsing import confinement, results
from services.ingest.parsing.limits import ParseLimits
from shared.errors import DependencyUnavailableError, InvalidDocumentError

# Kept aside so that there is room to say so when memory has run out.
_SPARE_BYTES = 1 << 20


def run(request: dict[str, Any], pipe: int, parent_pid: int) -> NoReturn:
    """Handles one request and never returns; the exit code is 0 if a line said how it ended."""
    try:
        confinement.die_with_parent(parent_pid)
        _silence()
        limits = ParseLimits(**request["limits"])
        confinement.limit_resources(limits)
        if not confinement.filter_system_calls():
            _say(pipe, "unconfined")
        _parse(request, limits, pipe)
    except BaseException:  # noqa: BLE001 - the fork server's own loop must never go on in a child.
        os._exit(70)
    os._exit(0)


def _parse(request: dict[str, Any], limits: ParseLimits, pipe: int) -> None:
    spare: bytearray | None = bytearray(_SPARE_BYTES)
    output_dir = Path(request["output_dir"])
    module_name, _, function_name = request["parser"].partition(":")
    parse = getattr(importlib.import_module(module_name), function_name)
    try:
        with Path(request["path"]).open("rb") as file:
            data = file.read(limits.max_input_bytes + 1)
        document = parse(
            data,
            display_name=request["display_name"],
            declared_media_type=request["declared_media_type"],
            limits=limits,
            save_asset=lambda sha256, content: results.save_asset(output_dir, sha256, content),
            on_progress=lambda done, total: _say(pipe, f"progress {done} {total}"),
        )
        results.write_result(output_dir, document)
    except MemoryError:
        spare = None
        gc.collect()
        _say_error(pipe, InvalidDocumentError("PARSE_MEMORY"))
    except (InvalidDocumentError, DependencyUnavailableError) as error:
        _say_error(pipe, error)
    except OSError as error:
        _say_error(pipe, _fault(error, limits))
    else:
        del spare
        _say(pipe, "done")


def _fault(error: OSError, limits: ParseLimits) -> InvalidDocumentError | DependencyUnavailableError:
    """A result over the file size limit is the document's fault, a full or unreadable spool is ours."""
    if error.errno == errno.EFBIG:
        return InvalidDocumentError("TOO_MUCH_TEXT", limit=limits.max_characters)
    if error.errno == errno.EPERM:
        raise error  # The system call filter said no: this is no sound parser any more.
    return DependencyUnavailableError("PARSER_UNAVAILABLE")


def _say_error(pipe: int, error: InvalidDocumentError | DependencyUnavailableError) -> None:
    facts = {"code": error.code, "reason": error.reason, "parameters": dict(error.parameters)}
    _say(pipe, "error " + json.dumps(facts))


def _say(pipe: int, line: str) -> None:
    os.write(pipe, line.encode() + b"\n")


def _silence() -> None:
    """Libraries print about odd documents; nobody reads it and it may hold document text."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
