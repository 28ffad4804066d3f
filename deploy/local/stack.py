"""`python -m deploy.local.stack up|down`: the whole system on one machine, for laptops and tests.

Owns the command line, the ports, the ready line and the exit codes: 0 stopped as asked,
1 could not start, 2 usage. Never used in a cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from deploy.local.console import StackError, tell
from deploy.local.data_folder import DataFolder, default_data_dir, process_lives

# This process starts others while gRPC threads run; gRPC's handlers for forks would get in the way.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

DEFAULT_PORTS = {"ingest": 7401, "embedder": 7402, "search": 7403}
# A stack that was killed: its guard needs a moment to stop PostgreSQL.
LEFTOVER_SECONDS = 60.0
DOWN_SECONDS = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    folder = DataFolder(options.data)
    try:
        if options.command == "down":
            return down(folder)
        return detach(folder, options) if options.detach else up(folder, options)
    except StackError as error:
        tell(str(error))
        return 1


def up(folder: DataFolder, options: argparse.Namespace) -> int:
    """Runs the stack until SIGTERM or Ctrl-C; returns 0 when it stopped cleanly."""
    folder.create()
    _lock(folder)
    stopping = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    ports = choose_ports({service: getattr(options, f"{service}_port") for service in DEFAULT_PORTS})
    with warnings.catch_warnings():
        # The PostgreSQL package says that it puts its socket under /tmp; that is meant.
        warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR")
        from deploy.local.running import Stack
    stack = Stack(folder, ports, workers=options.workers, verbose=options.verbose, stopping=stopping)
    try:
        stack.start()
        if not stopping.is_set():
            addresses = {**stack.addresses, "postgres": stack.database_uri}
            folder.write_state({"pid": os.getpid(), "addresses": addresses, "pids": stack.pids()})
            print(ready_line(addresses), flush=True)
            stack.watch()
    finally:
        tell("stopping")
        stack.stop()
        folder.remove_state()
        folder.release()
    tell("stopped")
    return 0


def detach(folder: DataFolder, options: argparse.Namespace) -> int:
    """Starts the stack in the background, prints its ready line, returns; `down` stops it."""
    folder.create()
    command = [sys.executable, "-m", "deploy.local.stack", "up", "--data", str(folder.path)]
    for service in DEFAULT_PORTS:
        command += [f"--{service}-port", str(getattr(options, f"{service}_port"))]
    command += ["--workers", str(options.workers)]
    with (folder.logs / "stack.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    if not line:
        code = process.wait()
        sys.stderr.write((folder.logs / "stack.log").read_text(encoding="utf-8", errors="replace"))
        return code or 1
    print(line, end="", flush=True)
    return 0


def down(folder: DataFolder) -> int:
    """Stops the stack of `folder` and waits for its end; nothing running is no fault."""
    if not folder.path.is_dir() or folder.try_lock():
        folder.release()
        tell(f"nothing runs on {folder.path}")
        return 0
    state = folder.read_state()
    if state is not None and process_lives(int(state["pid"])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(state["pid"]), signal.SIGTERM)
    elif state is None:
        raise StackError(f"the stack on {folder.path} is still starting or already stopping; try again")
    # The lock is free again when the stack, or the guard of one that was killed, has ended.
    if not folder.try_lock(DOWN_SECONDS):
        raise StackError(f"the stack on {folder.path} did not stop within {DOWN_SECONDS:g} s")
    folder.remove_state()
    folder.release()
    tell("stopped")
    return 0


def ready_line(addresses: dict[str, str]) -> str:
    """Returns the line that tools wait for on stdout."""
    names = ("ingest", "embedder", "search", "postgres")
    return " ".join(["ready", *(f"{name}={addresses[name]}" for name in names)])


def choose_ports(wanted: dict[str, int]) -> dict[str, int]:
    """Returns the ports, 0 replaced by a free one; raises StackError naming a taken one.

    All are held open until all are chosen, so that no two services get the same.
    """
    chosen: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        for service, port in wanted.items():
            # Without SO_REUSEPORT: gRPC sets it, and two servers would share a port unnoticed.
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # Connections of an earlier run that linger in TIME_WAIT are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                probe.listen(1)
            except (OSError, OverflowError) as error:
                raise StackError(
                    f"port {port} of the {service} service cannot be used ({error}); "
                    f"choose another one with --{service}-port, 0 for any free one. [PORT_TAKEN]"
                ) from error
            chosen[service] = probe.getsockname()[1]
    return chosen


def _lock(folder: DataFolder) -> None:
    if folder.try_lock():
        return
    state = folder.read_state()
    if state is not None and process_lives(int(state["pid"])):
        raise StackError(
            f"a stack runs on {folder.path} already (process {state['pid']}): "
            f"{ready_line(state['addresses'])}\nstop it with: readymark down --data {folder.path}"
        )
    tell("waiting for an earlier stack on this folder to end")
    if not folder.try_lock(LEFTOVER_SECONDS):
        raise StackError(f"another stack holds {folder.path}; stop it, or choose another folder with --data")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="readymark", description="Run the whole system on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    up_command = commands.add_parser("up", help="start everything; Ctrl-C stops it")
    down_command = commands.add_parser("down", help="stop what `up` started")
    for command in (up_command, down_command):
        command.add_argument(
            "--data", type=Path, metavar="DIR", default=default_data_dir(), help="data folder (%(default)s)"
        )
    for service, port in DEFAULT_PORTS.items():
        up_command.add_argument(
            f"--{service}-port", type=int, metavar="N", default=port, help="(%(default)d; 0: any free one)"
        )
    up_command.add_argument(
        "--workers", type=_worker_count, metavar="N", default=1, help="worker processes (%(default)d)"
    )
    how = up_command.add_mutually_exclusive_group()
    how.add_argument("--detach", action="store_true", help="return when all serve; `readymark down` stops it")
    how.add_argument("--verbose", "-v", action="store_true", help="logs on stderr instead of DIR/logs")
    return parser


def _worker_count(text: str) -> int:
    count: Any = int(text) if text.isdigit() else 0
    if not 1 <= count <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 64")
    return int(count)


if __name__ == "__main__":
    sys.exit(main())
