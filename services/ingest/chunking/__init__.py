"""Blocks to chunks that fit the embedding model. Pure: no clock, no randomness, no input or output."""

from services.ingest.chunking.chunker import CHUNKER_VERSION, Chunker, chunk_warnings

__all__ = ["CHUNKER_VERSION", "Chunker", "chunk_warnings"]
