"""A page becomes the text that its reader sees."""

from services.ingest.model import BlockKind
from tests.support.parsing import parse_bytes

PAGE = """<!doctype html><html><head><title>产品 &amp; 手册</title><style>.x{}</style>
<script>var S="脚本";</script></head><body><nav>导航</nav><h1>产品手册</h1>
<p>这是<b>第一</b>段，
换行之后*继续*。&#0;</p><h2>规格</h2>
<table><caption>表 1：规格</caption><tr><th>型号</th><th>重量</th></tr>
<tr><td rowspan=2>A1</td><td>3公斤<br>净重</td></tr><tr><td>4公斤</td></tr></table>
<ul><li>一<ul><li>一点一</li></ul></li></ul><pre><code class="language-c">int x;
  int y;</code></pre><div style="display:none">隐藏</div>
<img src="data:image/png;base64,AAAA" alt="示意图"></body></html>"""


def test_content_is_kept_and_the_rest_is_not() -> None:
    parsed = parse_bytes(PAGE.encode())
    assert parsed.blocks == [
        (BlockKind.HEADING, "产品手册"),
        (BlockKind.PARAGRAPH, "这是第一段，换行之后*继续*。"),
        (BlockKind.HEADING, "规格"),
        (BlockKind.CAPTION, "表 1：规格"),
        (BlockKind.TABLE, "| 型号 | 重量 |\n| --- | --- |\n| A1 | 3公斤 净重 |\n|  | 4公斤 |"),
        (BlockKind.LIST_ITEM, "- 一"),
        (BlockKind.LIST_ITEM, "- 一点一"),
        (BlockKind.CODE, "int x;\n  int y;"),
        (BlockKind.IMAGE, "示意图"),
    ]
    assert parsed.document.title == "产品 & 手册"


def test_words_that_look_like_markdown_stay_words() -> None:
    parsed = parse_bytes(b"<html><p># not a heading<p>- not a list<p>2. nor this<p>a_b_c *x* [y](z)</html>")
    assert {kind for kind, _ in parsed.blocks} == {BlockKind.PARAGRAPH}
    assert parsed.document.text == "# not a heading\n\n- not a list\n\n2. nor this\n\na_b_c *x* [y](z)"


def test_no_block_claims_a_line_of_the_source() -> None:
    assert all(b.locator.start_line is None for b in parse_bytes(PAGE.encode()).document.blocks)


def test_thousands_of_nested_elements_do_not_hang() -> None:
    parsed = parse_bytes(b"<html><p>before</p>" + b"<div>" * 20_000 + b"deep" + b"</div>" * 20_000)
    assert "before" in parsed.document.text
