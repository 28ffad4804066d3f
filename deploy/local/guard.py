"""Stops PostgreSQL when the stack dies without doing so itself (SIGKILL, out of memory).

Started by the stack with a pipe as stdin, whose other end the stack and all its children
hold. End of file means that they are all gone; a line before it means that the stack has
stopped the database itself. Holds the lock of the data folder until the end, so that a
new stack does not join a server that is about to stop. Imports nothing heavy until then.
"""

from __future__ import annotations

import sys
from pathlib import Path

STOPPED = b"stopped\n"


def main(arguments: list[str]) -> int:
    (postgres_dir,) = arguments
    if sys.stdin.buffer.readline() == STOPPED:
        return 0
    from deploy.local.embedded_postgres import EmbeddedPostgres

    postgres = EmbeddedPostgres(Path(postgres_dir))
    # Joins the server that was left behind; without one it starts it and stops it again.
    postgres.start()
    postgres.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
