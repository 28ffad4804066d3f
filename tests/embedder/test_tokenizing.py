from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.embedder.model_files import ModelFiles, ModelFilesError, read_model_files
from services.embedder.tokenizing import InputKind, TextTokenizer
from shared.errors import InvalidArgumentError

DOCUMENT = InputKind.DOCUMENT


def test_ids_are_those_of_tokenizer_json_with_the_prefix(
    e5_tokenizer: TextTokenizer, e5_files: ModelFiles
) -> None:
    reference = Tokenizer.from_file(str(e5_files.tokenizer))
    (text,) = e5_tokenizer.tokenize(["年假有几天？"], DOCUMENT, truncate=False)
    assert text.ids.tolist() == reference.encode("passage: 年假有几天？").ids
    (text,) = e5_tokenizer.tokenize(["年假有几天？"], InputKind.QUERY, truncate=False)
    assert text.ids.tolist() == reference.encode("query: 年假有几天？").ids


def test_a_short_text_is_not_padded_although_the_file_asks_for_it(
    minilm_tokenizer: TextTokenizer, minilm_files: ModelFiles
) -> None:
    assert json.loads(minilm_files.tokenizer.read_text())["padding"] is not None
    (text,) = minilm_tokenizer.tokenize(["hello world"], DOCUMENT, truncate=False)
    assert len(text.ids) == 4


def test_the_overhead_is_what_prefix_and_special_tokens_take(
    e5_tokenizer: TextTokenizer, minilm_tokenizer: TextTokenizer
) -> None:
    assert e5_tokenizer.overhead_tokens(DOCUMENT) == 4
    assert minilm_tokenizer.overhead_tokens(DOCUMENT) == 2


def test_truncation_gives_what_the_library_itself_would_give(
    minilm_tokenizer: TextTokenizer, minilm_files: ModelFiles
) -> None:
    reference = Tokenizer.from_file(str(minilm_files.tokenizer))
    reference.no_padding()
    reference.enable_truncation(256)
    long = "Every good boy deserves fudge, and unbelievably so. " * 60
    (text,) = minilm_tokenizer.tokenize([long], DOCUMENT, truncate=True)
    assert text.truncated
    assert text.ids.tolist() == reference.encode(long).ids


def test_a_text_at_the_limit_passes_and_one_token_more_is_refused_by_index(
    minilm_tokenizer: TextTokenizer,
) -> None:
    (text,) = minilm_tokenizer.tokenize(["word " * 254], DOCUMENT, truncate=False)
    assert (len(text.ids), text.truncated) == (256, False)
    with pytest.raises(InvalidArgumentError) as caught:
        minilm_tokenizer.tokenize(["fine", "word " * 255], DOCUMENT, truncate=False)
    assert caught.value.reason == "INPUT_TOO_LONG"
    facts = caught.value.parameters
    assert (facts["index"], facts["tokens"], facts["limit"]) == ("1", "257", "256")


def test_a_giant_text_costs_no_more_than_its_first_part(minilm_tokenizer: TextTokenizer) -> None:
    giant = "several words in a row " * 100_000
    started_at = time.process_time()
    (text,) = minilm_tokenizer.tokenize([giant], DOCUMENT, truncate=True)
    assert time.process_time() - started_at < 0.2
    assert len(text.ids) == 256
    (start,) = minilm_tokenizer.tokenize([giant[:4000]], DOCUMENT, truncate=True)
    assert text.ids.tolist() == start.ids.tolist()


def test_a_text_of_many_characters_but_few_tokens_is_not_called_too_long(
    minilm_tokenizer: TextTokenizer,
) -> None:
    sparse = "begin" + " " * 100_000 + "end"
    (text,) = minilm_tokenizer.tokenize([sparse], DOCUMENT, truncate=False)
    assert (len(text.ids), text.truncated) == (4, False)


def test_unknown_tokens_are_counted(minilm_tokenizer: TextTokenizer, e5_tokenizer: TextTokenizer) -> None:
    (text,) = minilm_tokenizer.tokenize(["嵌入服务器 works"], DOCUMENT, truncate=False)
    assert text.unknown_token_count == 5
    (text,) = e5_tokenizer.tokenize(["嵌入服务器 works"], DOCUMENT, truncate=False)
    assert text.unknown_token_count == 0


def test_eight_threads_with_mixed_limits_never_disturb_each_other(minilm_tokenizer: TextTokenizer) -> None:
    texts = ["short", "word " * 300, "嵌入 " * 50, "middle sized text " * 20]
    expected = [text.ids.tolist() for text in minilm_tokenizer.tokenize(texts, DOCUMENT, truncate=True)]

    def work(number: int) -> bool:
        kind = InputKind.QUERY if number % 2 else DOCUMENT
        found = minilm_tokenizer.tokenize(texts, kind, truncate=True)
        return [text.ids.tolist() for text in found] == expected

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(240)))


def test_a_tokenizer_that_counts_otherwise_than_its_file_is_refused(
    minilm_files: ModelFiles, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_files.folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "BertTokenizer"
    config["do_lower_case"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json differs"):
        TextTokenizer(read_model_files("m", folder))
