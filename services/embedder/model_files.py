"""What a model folder says about itself, and its fingerprint.

Owns the reading of a Hugging Face style folder: where graph, weights and tokenizer lie, which
pooling, prefixes and length limit apply, in the order in which the contradicting files count.
A folder that asks for something this service cannot do is refused, never approximated. Code of
a model repository is never run. Loads no model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.embedder.pooling import Pooling

GRAPH_NAMES = ("onnx/model.onnx", "model.onnx")
POOLING_FLAG = "pooling_mode_"
POOLING_BY_FLAG = {
    "mean_tokens": Pooling.MEAN,
    "cls_token": Pooling.CLS,
    "lasttoken": Pooling.LAST_TOKEN,
}
# Their positions count from pad_token_id + 1.
SHIFTED_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl"})
# Above it a tokenizer's model_max_length means "not known" (it is 1e30 then).
MAX_PLAUSIBLE_TOKENS = 1_000_000
# Field 1 "location" of an ONNX external data entry, then field 2 with the file name.
EXTERNAL_FILE = re.compile(rb"\x0a\x08location\x12(.)([\x20-\x7e]+)", re.DOTALL)
HUB_FILES = ["*.json", "1_Pooling/*.json", "onnx/model.onnx", "onnx/model.onnx_data", "model.onnx*"]
FINGERPRINT_FORMAT = 1


class ModelFilesError(Exception):
    """The model cannot be used; the text says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model folder, read and judged."""

    model_id: str
    folder: Path
    graph: Path
    weights: tuple[Path, ...]
    """Files beside the graph that hold its tensors; empty when the graph holds them itself."""
    tokenizer: Path
    pooling: Pooling
    query_prefix: str
    document_prefix: str
    max_input_tokens: int
    pad_token_id: int

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all that decides a vector. Reads every byte of the model."""
        identity = {
            "format": FINGERPRINT_FORMAT,
            "graph": _sha256(self.graph),
            "weights": {path.name: _sha256(path) for path in self.weights},
            "tokenizer": _sha256(self.tokenizer),
            "pooling": self.pooling.value,
            "normalised": True,
            "query_prefix": self.query_prefix,
            "document_prefix": self.document_prefix,
            "max_input_tokens": self.max_input_tokens,
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def find_model(model: str, models_dir: Path) -> tuple[str, Path]:
    """Returns id and folder of a path, of a name under `models_dir`, or of a hub id such as "owner/name"."""
    for folder in (models_dir / model, Path(model)):
        if folder.is_dir():
            return folder.resolve().name, folder
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model, _download(model)
    raise ModelFilesError(
        f"There is no model {model!r} under {models_dir}; build it with "
        f"`python -m services.embedder.model_build {models_dir} --model {model}`, "
        "or set READYMARK_EMBEDDER_MODEL to the path of a model folder."
    )


def _download(hub_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelFilesError(
            f"There is no folder {hub_id!r}, and the hub gave no such model ({type(error).__name__}); "
            "set READYMARK_EMBEDDER_MODEL to the path of a model folder."
        ) from error


def read_model_files(model_id: str, folder: Path) -> ModelFiles:
    """Returns what the folder asks for; raises ModelFilesError when it cannot be done here."""
    graph = next((folder / name for name in GRAPH_NAMES if (folder / name).is_file()), None)
    if graph is None:
        raise ModelFilesError(f"{folder} has no ONNX graph: {' or '.join(GRAPH_NAMES)} is needed.")
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelFilesError(f"{folder} has no tokenizer.json; save the tokenizer in its fast form.")
    transformer, pooling, normalised = _modules(folder)
    sentence = _read_json(folder / "config_sentence_transformers.json")
    if not normalised and sentence.get("similarity_fn_name") in {"dot", "dot_score"}:
        raise ModelFilesError(f"{folder} compares by dot product; only vectors of length 1 are supported.")
    prompts = sentence.get("prompts") or {}
    network = _read_json(transformer / "config.json") or _read_json(folder / "config.json")
    return ModelFiles(
        model_id=model_id,
        folder=folder,
        graph=graph,
        weights=_external_files(graph),
        tokenizer=tokenizer,
        pooling=_pooling(pooling) if pooling else Pooling.MEAN,
        query_prefix=prompts.get("query") or "",
        document_prefix=prompts.get("document") or prompts.get("passage") or "",
        max_input_tokens=_max_input_tokens(transformer, folder, network),
        pad_token_id=int(network.get("pad_token_id") or 0),
    )


def _modules(folder: Path) -> tuple[Path, Path | None, bool]:
    """Returns transformer folder, pooling folder and whether the model normalises."""
    path = folder / "modules.json"
    if not path.is_file():
        # Sentence-transformers reads such a folder as transformer and mean pooling.
        pooling = folder / "1_Pooling"
        return folder, pooling if pooling.is_dir() else None, False
    by_kind = {str(module["type"]).rpartition(".")[2]: folder / module["path"] for module in _read_list(path)}
    unsupported = by_kind.keys() - {"Transformer", "Pooling", "Normalize"}
    if unsupported or "Transformer" not in by_kind:
        raise ModelFilesError(
            f"{folder} has the module {', '.join(sorted(unsupported)) or 'none'}; supported are "
            "Transformer, Pooling and Normalize."
        )
    return by_kind["Transformer"], by_kind.get("Pooling"), "Normalize" in by_kind


def _pooling(folder: Path) -> Pooling:
    settings = _read_json(folder / "config.json")
    if settings.get("include_prompt") is False:
        raise ModelFilesError(f"{folder} leaves the prompt out of pooling, which is not supported.")
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        chosen = [named]
    else:
        flags = (key.removeprefix(POOLING_FLAG) for key, on in settings.items() if on is True)
        chosen = [flag for flag in flags if POOLING_FLAG + flag in settings]
    modes = [POOLING_BY_FLAG.get(name) or _pooling_named(name) for name in chosen]
    if len(modes) != 1 or modes[0] is None:
        supported = ", ".join(Pooling)
        raise ModelFilesError(f"{folder} pools by {chosen or 'nothing'}; supported is one of {supported}.")
    return modes[0]


def _pooling_named(name: str) -> Pooling | None:
    return Pooling(name) if name in set(Pooling) else None


def _max_input_tokens(transformer: Path, folder: Path, network: Mapping[str, Any]) -> int:
    """Returns the smaller of what the model was published for and what its positions hold."""
    sentence = _read_json(transformer / "sentence_bert_config.json")
    tokenizer = _read_json(folder / "tokenizer_config.json")
    published = sentence.get("max_seq_length") or tokenizer.get("model_max_length")
    positions = network.get("max_position_embeddings")
    if positions and network.get("model_type") in SHIFTED_POSITIONS:
        positions -= int(network.get("pad_token_id") or 0) + 1
    limits = [int(limit) for limit in (published, positions) if limit and 0 < limit < MAX_PLAUSIBLE_TOKENS]
    if not limits:
        raise ModelFilesError(
            f"{folder} names no length limit; set max_seq_length in sentence_bert_config.json."
        )
    return min(limits)


def _external_files(graph: Path) -> tuple[Path, ...]:
    """Returns the weight files that the graph names; raises ModelFilesError for one outside its folder."""
    names: set[str] = set()
    for length, text in EXTERNAL_FILE.findall(graph.read_bytes()):
        names.add(text[: length[0]].decode())
    paths = tuple(graph.parent / name for name in sorted(names))
    for path in paths:
        if path.parent != graph.parent or not path.is_file():
            raise ModelFilesError(f"{graph} keeps weights in {path.name!r}, which is not beside it.")
    return paths


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in the file, or an empty one when there is no file."""
    if not path.is_file():
        return {}
    value = _parse(path)
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object.")
    return value


def _read_list(path: Path) -> list[dict[str, Any]]:
    value = _parse(path)
    if not isinstance(value, list):
        raise ModelFilesError(f"{path} does not hold a JSON list.")
    return value


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
