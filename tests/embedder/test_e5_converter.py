from __future__ import annotations

from pathlib import Path

import pytest

from services.embedder.e5_converter import PackageFormatError, read_package


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(PackageFormatError, match="weights"):
        read_package(path)
