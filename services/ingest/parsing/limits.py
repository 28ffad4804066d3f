"""How much one document may cost. Owns the numbers and nothing else."""

from __future__ import annotations

import dataclasses

MEBIBYTE = 1 << 20
MAX_REQUEST_BYTES = 65_536
"""One message to a fork server: paths, a name and these limits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParseLimits:
    """Limits of one parse; the first that is passed ends it with a named reason."""

    wall_seconds: float = 120.0
    cpu_seconds: int = 90
    memory_bytes: int = 2048 * MEBIBYTE
    """Address space of the process, libraries included (about 250 MiB before any document)."""
    max_input_bytes: int = 100 * MEBIBYTE
    max_pages: int = 5_000
    max_characters: int = 10_000_000
    max_blocks: int = 500_000
    max_assets: int = 2_000
    max_asset_bytes: int = 20 * MEBIBYTE
    max_assets_bytes: int = 256 * MEBIBYTE
    """All assets of a document together."""
    max_image_pixels: int = 64_000_000
    """All images of a document that have to be decoded, together."""
    max_result_bytes: int = 128 * MEBIBYTE
    """The file in which a parser process writes text and blocks."""
