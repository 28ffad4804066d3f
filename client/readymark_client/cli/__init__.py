"""The `readymark` command: reads the arguments, runs one command, turns errors into exit codes.

Owns the exit codes: 0 ok, 1 a document failed or a service refused, 2 usage, 3 a service is
not reachable. Commands are in the other files; none of them calls `sys.exit`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from readymark_client.cli import stack
from readymark_client.cli.arguments import parse
from readymark_client.cli.printing import print_error
from readymark_client.errors import ReadymarkClientError, ServiceUnreachable
from readymark_client.synchronous import Readymark

OK = 0
FAILED = 1
USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; results on stdout, faults on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in stack.COMMANDS:
        return stack.become(words)
    # gRPC's own log lines would stand between the lines meant for people.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    options = parse(words, os.environ)
    try:
        return _run(options)
    except ReadymarkClientError as error:
        print_error(error)
        return UNREACHABLE if isinstance(error, ServiceUnreachable) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough; Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _run(options: argparse.Namespace) -> int:
    with Readymark(
        options.ingest,
        options.search,
        options.embedder,
        language=options.language,
        timeout_seconds=options.timeout,
    ) as client:
        exit_code: int = options.run(client, options)
        return exit_code


__all__ = ["main"]
