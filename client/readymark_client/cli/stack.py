"""`readymark up` and `readymark down`: hand over to the local stack.

The client imports contracts only, so the stack is another program that takes this
process's place: signals and exit code are its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

MODULE = "deploy.local.stack"
COMMANDS = ("up", "down")


def become(words: Sequence[str]) -> int:
    """Replaces this process by the stack's program; returns only when it is not installed."""
    try:
        found = importlib.util.find_spec(MODULE)
    except ModuleNotFoundError:
        found = None
    if found is None:
        print(
            "This installation holds the client only; run the command in a checkout of Readymark, "
            "after `make setup`. [STACK_NOT_INSTALLED]",
            file=sys.stderr,
        )
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execv(sys.executable, [sys.executable, "-m", MODULE, *words])
