"""What the local stack says to the person in front of it: lines on stderr, errors with a cure."""

from __future__ import annotations

import sys


class StackError(Exception):
    """The stack cannot do what was asked; the text says what to do."""


def tell(text: str) -> None:
    """Prints one line on stderr: stdout holds the ready line and nothing else."""
    print(f"readymark: {text}", file=sys.stderr, flush=True)
