"""Pictures of a PDF as assets, each once. Owns their encoding and the limits on them.

A JPEG is handed on byte by byte; anything else is decoded and written as PNG.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence

import pypdfium2
import pypdfium2.raw as pdfium

from services.ingest.model import Asset
from services.ingest.parsing.limits import ParseLimits

# Smaller pictures are bullets, rules and backgrounds.
_MIN_SIDE_PIXELS = 32
_MAX_IMAGES_A_PAGE = 500
_SCAN_AREA_SHARE = 0.5
_PNG_LEVEL = 1  # Pictures of text shrink at any level; speed matters more here.


def is_mostly_image(page: pypdfium2.PdfPage) -> bool:
    """True if one picture covers more than half of the page: a scan, if there is no text."""
    width, height = page.get_size()
    for count, image in enumerate(page.get_objects(filter=[pdfium.FPDF_PAGEOBJ_IMAGE], max_depth=3)):
        if count >= _MAX_IMAGES_A_PAGE:
            break
        left, bottom, right, top = image.get_bounds()
        if (right - left) * (top - bottom) > _SCAN_AREA_SHARE * width * height:
            return True
    return False


class ImageCollector:
    """Saves the pictures of a document while its pages pass by."""

    def __init__(self, limits: ParseLimits, save_asset: Callable[[str, bytes], None]) -> None:
        self._limits = limits
        self._save_asset = save_asset
        self._assets: dict[str, Asset] = {}
        self._by_page: dict[int, list[str]] = collections.defaultdict(list)
        self._bytes = 0
        self._pixels = 0

    def collect(self, page: pypdfium2.PdfPage, number: int) -> None:
        """Takes the pictures of a page until a limit is reached; what is over it stays out."""
        for count, image in enumerate(page.get_objects(filter=[pdfium.FPDF_PAGEOBJ_IMAGE], max_depth=3)):
            if count >= _MAX_IMAGES_A_PAGE or len(self._assets) >= self._limits.max_assets:
                return
            try:
                width, height = image.get_px_size()
                if min(width, height) < _MIN_SIDE_PIXELS:
                    continue
                encoded = self._encode(image, width * height)
            except pypdfium2.PdfiumError:
                continue  # A picture that cannot be decoded is not worth the document.
            if encoded is not None:
                self._keep(number, width, height, *encoded)

    def of_page(self, number: int, captions: Sequence[str]) -> list[Asset]:
        """Returns the pictures that appear first on this page, with its caption if there is one of each."""
        assets = [self._assets[sha256] for sha256 in self._by_page.get(number, ())]
        if len(assets) == 1 and len(captions) == 1:
            asset = assets[0]
            captioned = Asset(
                asset.sha256,
                asset.media_type,
                asset.size_bytes,
                page=asset.page,
                caption=captions[0],
                width=asset.width,
                height=asset.height,
            )
            return [captioned]
        return assets

    def _keep(self, number: int, width: int, height: int, media_type: str, data: bytes) -> None:
        size = len(data)
        if size > self._limits.max_asset_bytes or self._bytes + size > self._limits.max_assets_bytes:
            return
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 in self._assets:
            return
        self._save_asset(sha256, data)
        self._bytes += size
        self._assets[sha256] = Asset(sha256, media_type, size, page=number, width=width, height=height)
        self._by_page[number].append(sha256)

    def _encode(self, image: pypdfium2.PdfImage, pixels: int) -> tuple[str, bytes] | None:
        filters = list(image.get_filters())
        if filters == ["DCTDecode"]:
            size = pdfium.FPDFImageObj_GetImageDataRaw(image, None, 0)
            if size > self._limits.max_asset_bytes:
                return None
            buffer = ctypes.create_string_buffer(size)
            pdfium.FPDFImageObj_GetImageDataRaw(image, buffer, size)
            return "image/jpeg", buffer.raw
        self._pixels += pixels
        if self._pixels > self._limits.max_image_pixels:
            return None
        return "image/png", _png(image.get_bitmap())


def _png(bitmap: pypdfium2.PdfBitmap) -> bytes:
    width, height, stride, channels = bitmap.width, bitmap.height, bitmap.stride, bitmap.n_channels
    pixels = bytearray(bytes(bitmap.buffer)[: stride * height])
    if channels >= 3:  # PDFium keeps blue first, PNG red.
        pixels[0::channels], pixels[2::channels] = pixels[2::channels], pixels[0::channels]
    if bitmap.format == pdfium.FPDFBitmap_BGRx:  # The fourth byte is padding; PNG reads it as alpha.
        pixels[3::4] = b"\xff" * len(pixels[3::4])
    row = width * channels
    rows = b"".join(b"\0" + bytes(pixels[start : start + row]) for start in range(0, stride * height, stride))
    color = {1: 0, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, _PNG_LEVEL)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )
