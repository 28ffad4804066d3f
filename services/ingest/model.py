"""The values that pass between the stages: blocks, assets, chunks, warnings.

Owns their shape and their JSON form (what a parser process and a snapshot write). Knows
no database, no network, no parser.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NewType

DocumentId = NewType("DocumentId", str)
VersionId = NewType("VersionId", int)
JobId = NewType("JobId", int)
CollectionId = NewType("CollectionId", int)


class BlockKind(enum.StrEnum):
    HEADING = "heading"
    PARAGRAPH = "paragraph"
    LIST_ITEM = "list_item"
    TABLE = "table"
    CODE = "code"
    QUOTE = "quote"
    CAPTION = "caption"
    IMAGE = "image"


@dataclasses.dataclass(frozen=True, slots=True)
class Locator:
    """Where something stands in the original. Pages and lines count from 1; None = the format has none.

    `start_char`, `end_char`: code points into the parsed text, half open.
    """

    start_char: int
    end_char: int
    _: dataclasses.KW_ONLY
    heading_path: tuple[str, ...] = ()
    page: int | None = None
    end_page: int | None = None
    start_line: int | None = None
    end_line: int | None = None
    sheet: str | None = None
    cell_range: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A piece of a parsed document, in reading order. `text == document.text[start_char:end_char]`."""

    kind: BlockKind
    locator: Locator
    _: dataclasses.KW_ONLY
    level: int | None = None
    """Of a heading, 1 to 6."""
    header_rows: int = 0
    """Of a table in Markdown form: leading lines that are its header."""
    language: str | None = None
    """Of code, as the fence names it."""
    asset_sha256: str | None = None
    """Of an image: the asset it shows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    """An image or other file taken out of a document. Its bytes travel beside it, keyed by `sha256`."""

    sha256: str
    media_type: str
    size_bytes: int
    _: dataclasses.KW_ONLY
    page: int | None = None
    caption: str | None = None
    width: int | None = None
    height: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Warning:
    """Something the user should know; `reason` and `parameters` as in shared/messages.py."""

    reason: str
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    page: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParsedDocument:
    """What a parser gives. `text` holds every block; blocks are slices of it, in order."""

    media_type: str
    text: str
    blocks: tuple[Block, ...]
    assets: tuple[Asset, ...] = ()
    warnings: tuple[Warning, ...] = ()
    title: str | None = None
    encoding: str | None = None
    page_count: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The unit that gets a vector. `content` is an exact slice of the parsed text."""

    chunk_id: str
    ordinal: int
    content: str
    prefix: str
    """Heading path or repeated table header; embedded in front of `content`."""
    kind: BlockKind
    locator: Locator
    token_count: int
    """Of `embed_text` by the model's tokenizer, special tokens and model prefix included."""
    unknown_token_count: int = 0
    asset_sha256s: tuple[str, ...] = ()

    @property
    def embed_text(self) -> str:
        return self.prefix + self.content


def to_json(value: Any) -> Any:
    """Returns a dataclass of this file as plain JSON values; None and empty fields stay out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: to_json(item) for name, item in pairs if item not in (None, (), "", {})}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


def locator_from_json(data: Mapping[str, Any]) -> Locator:
    return Locator(
        start_char=int(data.get("start_char", 0)),
        end_char=int(data.get("end_char", 0)),
        heading_path=tuple(data.get("heading_path", ())),
        page=data.get("page"),
        end_page=data.get("end_page"),
        start_line=data.get("start_line"),
        end_line=data.get("end_line"),
        sheet=data.get("sheet"),
        cell_range=data.get("cell_range"),
    )


def block_from_json(data: Mapping[str, Any]) -> Block:
    return Block(
        kind=BlockKind(data["kind"]),
        locator=locator_from_json(data["locator"]),
        level=data.get("level"),
        header_rows=int(data.get("header_rows", 0)),
        language=data.get("language"),
        asset_sha256=data.get("asset_sha256"),
    )


def asset_from_json(data: Mapping[str, Any]) -> Asset:
    return Asset(
        sha256=str(data["sha256"]),
        media_type=str(data["media_type"]),
        size_bytes=int(data.get("size_bytes", 0)),
        page=data.get("page"),
        caption=data.get("caption"),
        width=data.get("width"),
        height=data.get("height"),
    )


def warning_from_json(data: Mapping[str, Any]) -> Warning:
    parameters = {str(key): str(item) for key, item in dict(data.get("parameters", {})).items()}
    return Warning(str(data["reason"]), parameters, page=data.get("page"))


def parsed_document_from_json(data: Mapping[str, Any]) -> ParsedDocument:
    return ParsedDocument(
        media_type=str(data["media_type"]),
        text=str(data.get("text", "")),
        blocks=tuple(block_from_json(item) for item in data.get("blocks", ())),
        assets=tuple(asset_from_json(item) for item in data.get("assets", ())),
        warnings=tuple(warning_from_json(item) for item in data.get("warnings", ())),
        title=data.get("title"),
        encoding=data.get("encoding"),
        page_count=data.get("page_count"),
    )


def chunk_from_json(data: Mapping[str, Any]) -> Chunk:
    return Chunk(
        chunk_id=str(data["chunk_id"]),
        ordinal=int(data.get("ordinal", 0)),
        content=str(data.get("content", "")),
        prefix=str(data.get("prefix", "")),
        kind=BlockKind(data["kind"]),
        locator=locator_from_json(data["locator"]),
        token_count=int(data.get("token_count", 0)),
        unknown_token_count=int(data.get("unknown_token_count", 0)),
        asset_sha256s=tuple(data.get("asset_sha256s", ())),
    )
