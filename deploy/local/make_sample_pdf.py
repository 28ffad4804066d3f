"""Writes samples/product-overview.pdf: `python -m deploy.local.make_sample_pdf [PATH]`.

A small PDF writer for text pages in Helvetica, the same bytes every time. It exists so that
the sample has a source that can be read and changed; it is no general PDF library.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

TARGET = Path(__file__).parent / "samples" / "product-overview.pdf"
PAGE_WIDTH, PAGE_HEIGHT, MARGIN = 595, 842, 64
BODY_SIZE, HEADING_SIZE, TITLE_SIZE = 11, 15, 22
# Characters of a line: Helvetica at 11 points is about 5.2 points wide on average.
LINE_CHARACTERS = 84

# Page by page: (heading, paragraphs).
PAGES: Sequence[tuple[str, Sequence[str]]] = (
    (
        "Product overview",
        (
            "Harbourlight makes tide gauges for small harbours. A gauge hangs on a quay wall, measures "
            "the height of the water by radar, and sends it to the harbour office every minute. This "
            "overview is for people who plan an installation; the installation manual has the details.",
            "There are two models. The HL-200 is for sheltered basins with waves of up to half a metre. "
            "The HL-400 is for open quays: its case is made of titanium and it averages over waves of "
            "up to three metres. Both use the same mounting plate, so one can replace the other in ten "
            "minutes.",
            "The radar looks straight down and needs a free cone of eight degrees. It measures "
            "distances from 0.4 to 25 metres with an error of at most 4 millimetres, in rain and fog as "
            "well. Ice on the water is reported as ice and not as a tide.",
        ),
    ),
    (
        "Power and battery",
        (
            "A gauge runs on 12 volts. With the solar panel that comes with it no cable is needed south "
            "of the 60th parallel. The battery of the HL-200 lasts for 21 days without sun; that of the "
            "HL-400, which measures more often, lasts for 14 days. It can be exchanged without stopping "
            "the gauge.",
            "When the voltage drops below 11.2 volts the gauge sends a warning and measures every ten "
            "minutes instead of every minute. Below 10.6 volts it stores the last values and switches "
            "itself off. It starts again when the voltage has been above 11.8 volts for five minutes.",
            "The battery must not be charged below minus 10 degrees Celsius. The gauge knows this and "
            "waits; in a long frost the solar panel then feeds the electronics only.",
        ),
    ),
    (
        "Data and warranty",
        (
            "Measurements travel over the mobile network or, where there is none, over a radio link of "
            "up to eight kilometres. If the link is down the gauge keeps the values of the last 90 days "
            "and sends them later, oldest first. Every value carries a time stamp that is correct to a "
            "tenth of a second.",
            "The harbour office sees the water level in a browser and can have alarms sent by text "
            "message. An export in CSV form is available for every day, and a programming interface for "
            "those who want to build their own displays.",
            "The warranty is five years for the case and the radar, and two years for the battery. It "
            "covers damage by lightning if the gauge was earthed as the manual says. Send a broken "
            "gauge back without its mounting plate; a replacement is on its way within three working "
            "days.",
        ),
    ),
)


def build_pdf() -> bytes:
    """Returns the whole file."""
    page_ids = [4 + 2 * index for index in range(len(PAGES))]
    kids = " ".join(f"{page_id} 0 R" for page_id in page_ids)
    objects: list[bytes] = [
        b"<< /Type /Catalog /Pages 2 0 R /Lang (en) >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(PAGES)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, (heading, paragraphs) in enumerate(PAGES, start=1):
        content = _page_content(number, heading, paragraphs)
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {PAGE_WIDTH} {PAGE_HEIGHT}] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {len(objects) + 2} 0 R >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
    objects.append(b"<< /Title (Harbourlight product overview) /Author (Harbourlight Instruments) >>")
    return _file_of(objects)


def _page_content(number: int, heading: str, paragraphs: Sequence[str]) -> bytes:
    heading_size = TITLE_SIZE if number == 1 else HEADING_SIZE
    y = PAGE_HEIGHT - MARGIN - heading_size
    lines = [_text(MARGIN, y, heading_size, heading)]
    y -= 2 * heading_size
    for paragraph in paragraphs:
        for line in textwrap.wrap(paragraph, LINE_CHARACTERS):
            lines.append(_text(MARGIN, y, BODY_SIZE, line))
            y -= 16
        y -= 10
    lines.append(_text(PAGE_WIDTH - MARGIN - 60, MARGIN // 2, 9, f"Page {number} of {len(PAGES)}"))
    return b"\n".join(lines)


def _text(x: int, y: int, size: int, text: str) -> bytes:
    escaped = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
    return f"BT /F1 {size} Tf {x} {y} Td ({escaped}) Tj ET".encode("cp1252")


def _file_of(objects: Sequence[bytes]) -> bytes:
    """Returns header, numbered objects, cross reference table and trailer; the last object is the info."""
    data = bytearray(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    data += b"trailer\n<< /Size %d /Root 1 0 R /Info %d 0 R >>\n" % (len(objects) + 1, len(objects))
    data += b"startxref\n%d\n%%%%EOF\n" % start
    return bytes(data)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_bytes(build_pdf())
    print(f"{target}: {target.stat().st_size} bytes")
