"""Whether Chinese can be lost for want of a font. Owns the self-test and when it matters.

PDFium drops a text object of one single character if its font is neither embedded nor
installed, and many Chinese typesetters write one object a character. Nothing is reported
then, so we look.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools

import pypdfium2
import pypdfium2.raw as pdfium

_SAMPLE = "中文自检"
_MAX_OBJECTS_A_PAGE = 2_000


@functools.cache
def has_cjk_font() -> bool:
    """True if Chinese in a font that is not embedded is read; once a process, about 10 ms."""
    with contextlib.closing(pypdfium2.PdfDocument(self_test_pdf(_SAMPLE))) as document:
        return bool(document[0].get_textpage().get_text_bounded().strip() == _SAMPLE)


def lacks_cjk_font(page: pypdfium2.PdfPage, text_page: pypdfium2.PdfTextPage) -> bool:
    """True if the page has text that is lost because no Chinese font is installed."""
    if has_cjk_font():
        return False
    objects = page.get_objects(filter=[pdfium.FPDF_PAGEOBJ_TEXT], max_depth=3)
    for count, text_object in enumerate(objects):
        if count >= _MAX_OBJECTS_A_PAGE:
            break
        font = pdfium.FPDFTextObj_GetFont(text_object.raw)
        if not font or pdfium.FPDFFont_GetIsEmbedded(font) != 0:
            continue
        # Two bytes are the closing zero alone: the object draws something and says nothing.
        unread = pdfium.FPDFTextObj_GetText(text_object.raw, text_page.raw, None, 0) <= 2
        if unread and _is_wide(font):
            return True
    return False


def _is_wide(font: pdfium.FPDF_FONT) -> bool:
    """Latin fonts are never missing: PDFium brings its own. Chinese ones are symbolic or named otherwise."""
    size = pdfium.FPDFFont_GetBaseFontName(font, None, 0)
    buffer = ctypes.create_string_buffer(max(1, size))
    pdfium.FPDFFont_GetBaseFontName(font, buffer, size)
    name = buffer.value.decode("latin-1")
    return name.partition(",")[0].partition("-")[0] not in {
        "Helvetica",
        "Times",
        "Courier",
        "Arial",
        "TimesNewRoman",
        "CourierNew",
        "Symbol",
        "ZapfDingbats",
    }


def self_test_pdf(text: str) -> bytes:
    """Returns a PDF with one text object a character, in a font that is not embedded."""
    shows = b"".join(
        b"1 0 0 1 %d 100 Tm <%s> Tj " % (20 + 20 * index, character.encode("gbk").hex().encode())
        for index, character in enumerate(text)
    )
    content = b"BT /F 16 Tf " + shows + b"ET"
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
        b"<</Type/Font/Subtype/Type0/BaseFont/SimSun/Encoding/GBK-EUC-H/DescendantFonts[6 0 R]>>",
        b"<</Type/Font/Subtype/CIDFontType0/BaseFont/SimSun/FontDescriptor 7 0 R"
        b"/CIDSystemInfo<</Registry(Adobe)/Ordering(GB1)/Supplement 2>>/DW 1000>>",
        b"<</Type/FontDescriptor/FontName/SimSun/Flags 4/FontBBox[0 -200 1000 800]/ItalicAngle 0"
        b"/Ascent 800/Descent -200/CapHeight 700/StemV 80>>",
    )
    body, offsets = b"%PDF-1.7\n", []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return (
        body
        + b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Root 1 0 R/Size %d>>\nstartxref\n%d\n%%%%EOF"
        % (
            len(objects) + 1,
            table,
            len(objects) + 1,
            len(body),
        )
    )
