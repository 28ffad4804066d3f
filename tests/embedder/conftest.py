"""The real models, built once from the installed packages, and one loaded embedder a module."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.embedder.encoder import OnnxEncoder
from services.embedder.model_build import build_model
from services.embedder.model_files import ModelFiles, read_model_files
from services.embedder.tokenizing import TextTokenizer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def models_dir() -> Path:
    return Path(os.environ.get("READYMARK_MODELS") or REPOSITORY / ".readymark/models").resolve()


@pytest.fixture(scope="session")
def e5_files(models_dir: Path) -> ModelFiles:
    folder = build_model(models_dir, "multilingual-e5-small")
    return read_model_files("multilingual-e5-small", folder)


@pytest.fixture(scope="session")
def minilm_files(models_dir: Path) -> ModelFiles:
    return read_model_files("all-MiniLM-L6-v2", build_model(models_dir, "all-MiniLM-L6-v2"))


@pytest.fixture(scope="session")
def e5_tokenizer(e5_files: ModelFiles) -> TextTokenizer:
    return TextTokenizer(e5_files)


@pytest.fixture(scope="session")
def minilm_tokenizer(minilm_files: ModelFiles) -> TextTokenizer:
    return TextTokenizer(minilm_files)


@pytest.fixture(scope="session")
def e5_encoder(e5_files: ModelFiles) -> OnnxEncoder:
    return OnnxEncoder(e5_files, "cpu")


@pytest.fixture(scope="session")
def minilm_encoder(minilm_files: ModelFiles) -> OnnxEncoder:
    return OnnxEncoder(minilm_files, "cpu")
