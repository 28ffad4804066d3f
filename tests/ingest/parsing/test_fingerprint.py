"""The fingerprint of the parsers."""

import subprocess
import sys

from services.ingest.parsing import fingerprint


def test_the_fingerprint_is_the_same_in_another_process_and_loads_no_parser() -> None:
    code = (
        "import sys; from services.ingest.parsing.fingerprint import parser_fingerprint as f;"
        "print(f(), 'pypdfium2' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    ).stdout.split()
    assert output == [fingerprint.parser_fingerprint(), "False"]
