from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.embedder.model_files import ModelFiles, ModelFilesError, find_model, read_model_files
from services.embedder.pooling import Pooling


@pytest.fixture
def folder(minilm_files: ModelFiles, tmp_path: Path) -> Path:
    """A copy of the small model that a test may change."""
    target = tmp_path / "model"
    shutil.copytree(minilm_files.folder, target)
    return target


def change(path: Path, edit: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def test_the_models_say_what_they_were_trained_with(e5_files: ModelFiles, minilm_files: ModelFiles) -> None:
    assert (e5_files.query_prefix, e5_files.document_prefix) == ("query: ", "passage: ")
    assert (e5_files.max_input_tokens, e5_files.pooling, e5_files.pad_token_id) == (512, Pooling.MEAN, 1)
    assert (minilm_files.query_prefix, minilm_files.document_prefix) == ("", "")
    assert (minilm_files.max_input_tokens, minilm_files.pooling) == (256, Pooling.MEAN)
    assert [path.name for path in minilm_files.weights] == ["model.onnx_data"]


@pytest.mark.parametrize(
    ("path", "edit"),
    [
        ("onnx/model.onnx", None),
        ("onnx/model.onnx_data", None),
        ("tokenizer.json", None),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}),
        ("config_sentence_transformers.json", {"prompts": {"query": "q: "}}),
        ("config_sentence_transformers.json", {"prompts": {"document": "d: "}}),
        ("sentence_bert_config.json", {"max_seq_length": 128}),
    ],
)
def test_whatever_decides_a_vector_changes_the_fingerprint(
    folder: Path, path: str, edit: dict[str, object] | None
) -> None:
    before = read_model_files("m", folder).fingerprint()
    if edit is None:
        with (folder / path).open("ab") as file:
            file.write(b" ")
    else:
        change(folder / path, lambda value: value.update(edit))
    assert read_model_files("m", folder).fingerprint() != before


def test_name_and_place_of_the_folder_do_not_change_the_fingerprint(
    folder: Path, minilm_files: ModelFiles
) -> None:
    assert read_model_files("another", folder).fingerprint() == minilm_files.fingerprint()


def test_a_module_that_cannot_be_computed_is_refused_by_name(folder: Path) -> None:
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    change(folder / "modules.json", lambda modules: modules.append(dense))
    with pytest.raises(ModelFilesError, match="Dense"):
        read_model_files("m", folder)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "max_tokens"),
        ({"pooling_mode_cls_token": True}, "cls_token"),
        ({"include_prompt": False}, "prompt"),
    ],
)
def test_a_pooling_that_cannot_be_computed_is_refused(
    folder: Path, edit: dict[str, object], named: str
) -> None:
    change(folder / "1_Pooling/config.json", lambda value: value.update(edit))
    with pytest.raises(ModelFilesError, match=named):
        read_model_files("m", folder)


def test_the_newer_name_of_the_pooling_is_understood(folder: Path) -> None:
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    assert read_model_files("m", folder).pooling is Pooling.CLS


def test_the_length_limit_comes_from_the_tokenizer_when_the_sentence_config_names_none(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text("{}")
    assert read_model_files("m", folder).max_input_tokens == 512
    change(folder / "tokenizer_config.json", lambda value: value.update(model_max_length=10**30))
    assert read_model_files("m", folder).max_input_tokens == 512, "the positions are the last resort"
    change(folder / "config.json", lambda value: value.pop("max_position_embeddings"))
    with pytest.raises(ModelFilesError, match="max_seq_length"):
        read_model_files("m", folder)


def test_the_length_limit_never_exceeds_the_positions(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8192}')
    assert read_model_files("m", folder).max_input_tokens == 512


def test_missing_weights_are_refused_before_anything_is_loaded(folder: Path) -> None:
    (folder / "onnx/model.onnx_data").unlink()
    with pytest.raises(ModelFilesError, match="onnx_data"):
        read_model_files("m", folder)


@pytest.mark.parametrize("missing", ["onnx/model.onnx", "tokenizer.json"])
def test_a_folder_without_graph_or_tokenizer_is_refused(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelFilesError, match=missing):
        read_model_files("m", folder)


def test_a_dot_product_model_without_normalisation_is_refused(folder: Path) -> None:
    change(folder / "modules.json", lambda modules: modules.pop())
    assert read_model_files("m", folder).pooling is Pooling.MEAN
    change(folder / "config_sentence_transformers.json", lambda v: v.update(similarity_fn_name="dot"))
    with pytest.raises(ModelFilesError, match="dot product"):
        read_model_files("m", folder)


def test_a_model_is_found_by_name_and_by_path(folder: Path) -> None:
    assert find_model("model", folder.parent) == ("model", folder)
    assert find_model(str(folder), Path("elsewhere")) == ("model", folder)


def test_an_unknown_model_is_refused_with_the_command_that_builds_it(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"services\.embedder\.model_build .* --model nothing"):
        find_model("nothing", tmp_path)
