"""Markdown to blocks, by the line map of markdown-it-py.

Owns how Markdown reads as text: marks of emphasis and link targets go, list markers, code
and table rows stay. Tables are written anew with one row a line, so that rows can be
told apart by anyone who has only the text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

from services.ingest.model import BlockKind
from services.ingest.parsing.builder import DocumentBuilder
from services.ingest.parsing.captions import is_caption
from services.ingest.parsing.cleaning import normalize_line_ends

# Two levels a list; the library's own limit of 20 would drop the eleventh list silently.
_MAX_NESTING = 100
_TAGS = re.compile(r"<!--.*?(?:-->|\Z)|<(script|style)\b.*?</\1\s*>|<[^<>]*>", re.I | re.S)
_WIDE = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f\U00020000-\U0003ffff]")
_FRONT_MATTER = re.compile(r"---[ \t]*\n(?:.*\n)*?(?:---|\.\.\.)[ \t]*(?:\n|\Z)")
_FRONT_TITLE = re.compile(r"^title:[ \t]*(.+?)[ \t]*$", re.M)


def parse_markdown(text: str, builder: DocumentBuilder, *, has_source_lines: bool = True) -> None:
    """Adds the blocks of `text`. Without source lines (text made from HTML) no block names any."""
    text = normalize_line_ends(text)
    front = _FRONT_MATTER.match(text)
    if front and has_source_lines:
        title = _FRONT_TITLE.search(front.group())
        if title:
            builder.title = title.group(1).strip("\"'")
        # Blank lines in its place keep the line numbers of the rest.
        text = "\n" * front.group().count("\n") + text[front.end() :]
    parser = MarkdownIt("commonmark", {"maxNesting": _MAX_NESTING}).enable(["table", "strikethrough"])
    _Reader(parser.parse(text), builder, has_source_lines).read()


class _Reader:
    """Walks the flat list of tokens once."""

    def __init__(self, tokens: Sequence[Token], builder: DocumentBuilder, has_source_lines: bool) -> None:
        self._tokens = tokens
        self._builder = builder
        self._has_source_lines = has_source_lines
        self._markers: list[str] = []
        self._numbers: list[int | None] = []
        self._quotes = 0

    def read(self) -> None:
        index = 0
        while index < len(self._tokens):
            token = self._tokens[index]
            if token.type == "table_open":
                index = self._table(index)
                continue
            self._block(token, index)
            index += 1

    def _block(self, token: Token, index: int) -> None:
        match token.type:
            case "heading_open":
                self._heading(index)
            case "inline" if self._tokens[index - 1].type != "heading_open":
                self._paragraph(token)
            case "fence" | "code_block":
                self._code(token)
            case "html_block":
                self._add(BlockKind.PARAGRAPH, html.unescape(_TAGS.sub(" ", token.content)), token)
            case "bullet_list_open":
                self._numbers.append(None)
            case "ordered_list_open":
                self._numbers.append(int(token.attrs.get("start", 1)))
            case "bullet_list_close" | "ordered_list_close":
                self._numbers.pop()
            case "list_item_open":
                self._list_item()
            case "list_item_close":
                self._markers.pop()
            case "blockquote_open":
                self._quotes += 1
            case "blockquote_close":
                self._quotes -= 1

    def _code(self, token: Token) -> None:
        """The lines are those of the code itself, without its fence."""
        words = token.info.split()
        skipped = len(token.content) - len(token.content.lstrip("\n"))
        first = last = None
        if token.map and self._has_source_lines:
            first = token.map[0] + 1 + skipped + (1 if token.type == "fence" else 0)
            last = first + token.content.strip("\n").count("\n")
        self._builder.add(
            BlockKind.CODE,
            token.content,
            language=words[0] if words else None,
            start_line=first,
            end_line=last,
        )

    def _heading(self, index: int) -> None:
        token, inline = self._tokens[index], self._tokens[index + 1]
        text = " ".join(inline_text(inline.children or []).split())
        self._add(BlockKind.HEADING, text, token, level=int(token.tag[1:]))

    def _list_item(self) -> None:
        number = self._numbers[-1]
        self._markers.append("- " if number is None else f"{number}. ")
        if number is not None:
            self._numbers[-1] = number + 1

    def _paragraph(self, token: Token) -> None:
        children = token.children or []
        text = inline_text(children)
        if self._markers:
            # The marker belongs to the first paragraph of its item.
            marker, self._markers[-1] = self._markers[-1], ""
            self._add(BlockKind.LIST_ITEM, marker + text if text.strip() else "", token)
        elif self._quotes:
            self._add(BlockKind.QUOTE, text, token)
        elif len(children) == 1 and children[0].type == "image":
            self._add(BlockKind.IMAGE, text, token)
        elif is_caption(text):
            self._add(BlockKind.CAPTION, text, token)
        else:
            self._add(BlockKind.PARAGRAPH, text, token)

    def _table(self, index: int) -> int:
        """Adds the table that opens at `index` and returns where the next block begins."""
        opening = self._tokens[index]
        rows: list[list[str]] = []
        header_rows = 0
        while self._tokens[index].type != "table_close":
            token = self._tokens[index]
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline":
                cell = " ".join(inline_text(token.children or []).split())
                rows[-1].append(cell.replace("|", "\\|"))
            elif token.type == "thead_close" and any(rows[0]):
                header_rows = 2
            index += 1
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        if header_rows:
            lines.insert(1, "| " + " | ".join("---" for _ in rows[0]) + " |")
        else:
            lines = lines[1:]  # Markdown has no table without a header, so an empty one stood there.
        self._add(BlockKind.TABLE, "\n".join(lines), opening, header_rows=header_rows)
        return index + 1

    def _add(
        self,
        kind: BlockKind,
        text: str,
        token: Token,
        *,
        level: int | None = None,
        header_rows: int = 0,
    ) -> None:
        lines = token.map if self._has_source_lines else None
        self._builder.add(
            kind,
            text,
            level=level,
            header_rows=header_rows,
            start_line=lines[0] + 1 if lines else None,
            end_line=max(lines[1], lines[0] + 1) if lines else None,
        )


def inline_text(tokens: Sequence[Token]) -> str:
    """Returns the words of a line without its marks. A line break between two Chinese characters is none."""
    parts: list[str] = []
    breaks_at: list[int] = []
    for token in tokens:
        match token.type:
            case "softbreak":
                breaks_at.append(len(parts))
                parts.append(" ")
            case "hardbreak":
                parts.append("\n")
            case "image":
                parts.append(inline_text(token.children or []))
            case "html_inline":
                parts.append(" " if token.content[:3].lower() == "<br" else "")
            case _:
                parts.append(token.content)
    for position in breaks_at:
        before = "".join(parts[max(0, position - 3) : position])
        after = "".join(parts[position + 1 : position + 4])
        if before and after and _WIDE.match(before[-1]) and _WIDE.match(after[0]):
            parts[position] = ""
    return "".join(parts)
