"""Builders of test files: PDFs written by hand, so that each holds exactly what its test is about."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence

HELVETICA = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
PADDING = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")


def stream(content: bytes, entries: bytes = b"") -> bytes:
    return b"<</Length %d%s>>stream\n%s\nendstream" % (len(content), entries, content)


def assemble(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """Returns a PDF of these objects, numbered from 1; the first is its catalog."""
    body, offsets = b"%PDF-1.7\n", []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    tail = b"trailer<</Root 1 0 R/Size %d%s>>\nstartxref\n%d\n%%%%EOF" % (size, trailer, len(body))
    return body + b"xref\n0 %d\n0000000000 65535 f \n" % size + table + tail


def pdf(
    pages: Sequence[bytes],
    *,
    font: bytes = HELVETICA,
    extra: Sequence[bytes] = (),
    resources: bytes = b"",
    outline: Sequence[tuple[str, int]] = (),
    title: str | None = None,
    more: bytes = b"",
) -> bytes:
    """Returns a PDF with these page contents. Font is /F; `extra` objects begin at number 4.

    `outline`: bookmarks as (title, page from 0).
    """
    first_page = 4 + len(extra)
    page_numbers = [first_page + 2 * index for index in range(len(pages))]
    kids = b" ".join(b"%d 0 R" % number for number in page_numbers)
    objects = [
        b"",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages)),
        font,
        *extra,
    ]
    for index, content in enumerate(pages):
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 400 600]/Contents %d 0 R"
            b"/Resources<</Font<</F 3 0 R>>%s>>>>" % (page_numbers[index] + 1, resources)
        )
        objects.append(stream(content))
    catalog = b"<</Type/Catalog/Pages 2 0 R%s>>"
    entries = b""
    if outline:
        root = len(objects) + 1
        last = root + len(outline)
        objects.append(b"<</First %d 0 R/Last %d 0 R/Count %d>>" % (root + 1, last, len(outline)))
        for position, (name, page) in enumerate(outline):
            number = root + 1 + position
            links = (b"/Next %d 0 R" % (number + 1) if number < last else b"") + (
                b"/Prev %d 0 R" % (number - 1) if position else b""
            )
            objects.append(
                b"<</Title <%s>/Parent %d 0 R/Dest[%d 0 R/Fit]%s>>"
                % (("\ufeff" + name).encode("utf-16-be").hex().encode(), root, page_numbers[page], links)
            )
        entries = b"/Outlines %d 0 R" % root
    objects[0] = catalog % entries
    trailer = more
    if title is not None:
        objects.append(b"<</Title <%s>>>" % ("\ufeff" + title).encode("utf-16-be").hex().encode())
        trailer += b"/Info %d 0 R" % len(objects)
    return assemble(objects, trailer)


def lines(texts: Sequence[str | tuple[str, float]], *, top: float = 540, left: float = 40) -> bytes:
    """Returns page content with one line of Latin text below the other; a pair names its font size."""
    parts, y = [], top
    for item in texts:
        text, size = (item, 12.0) if isinstance(item, str) else item
        escaped = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
        parts.append(f"BT /F {size} Tf 1 0 0 1 {left} {y} Tm ({escaped}) Tj ET")
        y -= size * 1.25
    return "\n".join(parts).encode("latin-1")


def image_page(name: str = "I") -> bytes:
    """Returns page content that shows image /I over the whole page."""
    return b"q 400 0 0 600 0 0 cm /%s Do Q" % name.encode()


def gray_image(width: int = 64, height: int = 64, shade: int = 128) -> bytes:
    """Returns an image object with a gradient, stored with Flate."""
    pixels = bytes((shade + x + y) % 256 for y in range(height) for x in range(width))
    size = b"/Type/XObject/Subtype/Image/Width %d/Height %d" % (width, height)
    return stream(
        zlib.compress(pixels), size + b"/ColorSpace/DeviceGray/BitsPerComponent 8/Filter/FlateDecode"
    )


def scanned_pdf(pages: Sequence[bytes | None]) -> bytes:
    """Returns a PDF whose None pages are pictures only."""
    contents = [image_page() if content is None else content for content in pages]
    return pdf(contents, extra=[gray_image()], resources=b"/XObject<</I 4 0 R>>")


def flate_bomb_pdf(megabytes: int = 400) -> bytes:
    """Returns a PDF of some hundred kilobytes whose one page unpacks to `megabytes`."""
    packer = zlib.compressobj(9)
    packed = packer.compress(b"BT /F 12 Tf 20 200 Td (bomb) Tj ET\n")
    block = b" " * (1 << 20)
    packed += b"".join(packer.compress(block) for _ in range(megabytes)) + packer.flush()
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 300]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>"
    return assemble(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            page,
            stream(packed, b"/Filter/FlateDecode"),
            HELVETICA,
        ]
    )


def rc4(key: bytes, data: bytes) -> bytes:
    state, j = list(range(256)), 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    out, i, j = bytearray(), 0, 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)


def encrypted_pdf(password: str = "secret") -> bytes:
    """Returns a PDF that opens with `password` only (standard handler, revision 2, 40 bits)."""
    padded = (password.encode() + PADDING)[:32]
    owner = rc4(hashlib.md5(padded).digest()[:5], padded)
    permissions = -4
    file_id = b"0123456789abcdef"
    key = hashlib.md5(padded + owner + struct.pack("<i", permissions) + file_id).digest()[:5]
    user = rc4(key, PADDING)
    object_key = hashlib.md5(key + (4).to_bytes(3, "little") + (0).to_bytes(2, "little")).digest()[:10]
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 300]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>"
    return assemble(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            page,
            stream(rc4(object_key, lines(["Locked away from everyone"], top=200))),
            HELVETICA,
            b"<</Filter/Standard/V 1/R 2/O <%s>/U <%s>/P %d>>"
            % (owner.hex().encode(), user.hex().encode(), permissions),
        ],
        b"/Encrypt 6 0 R/ID[<%s><%s>]" % (file_id.hex().encode(), file_id.hex().encode()),
    )


def nul_mapped_pdf() -> bytes:
    """Returns a PDF whose font maps the letter b to U+0000."""
    cmap = (
        b"/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /X def "
        b"1 begincodespacerange <00> <ff> endcodespacerange "
        b"3 beginbfchar <61> <0061> <62> <0000> <63> <0063> endbfchar endcmap end end"
    )
    font = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/ToUnicode 4 0 R>>"
    return pdf(
        [lines(["abc and some more words here"]), lines(["second page of abc"])],
        font=font,
        extra=[stream(cmap)],
    )
