from __future__ import annotations

import random

import numpy as np
import onnxruntime
import pytest

from services.embedder.encoder import OnnxEncoder
from services.embedder.model_files import ModelFiles, ModelFilesError
from services.embedder.pooling import usable_rows
from services.embedder.tokenizing import InputKind, TextTokenizer

QUESTIONS = ["How many vacation days do I get?", "年假有几天？", "连接池的默认上限是多少？"]
PASSAGES = [
    "Employees are entitled to fifteen days of paid annual leave every year.",
    "员工每年享有十五天带薪年假。",
    "数据库连接池的默认上限为二十个连接。",
    "The connection pool holds at most twenty connections by default.",
    "小猫在垫子上睡觉。",
]


def test_the_first_values_of_minilm_are_the_published_ones(
    minilm_encoder: OnnxEncoder, minilm_tokenizer: TextTokenizer
) -> None:
    (text,) = minilm_tokenizer.tokenize(["The cat sits on the mat."], InputKind.DOCUMENT, truncate=False)
    golden = [0.13417712, -0.03290033, -0.02480374, 0.04143899, -0.03634768]
    assert np.allclose(minilm_encoder.encode([text.ids])[0, :5], golden, atol=2e-6)


def test_the_best_passage_of_a_question_is_right_in_english_and_chinese(
    e5_encoder: OnnxEncoder, e5_tokenizer: TextTokenizer
) -> None:
    def vectors(texts: list[str], kind: InputKind) -> np.ndarray:
        return np.vstack(
            [e5_encoder.encode([text.ids]) for text in e5_tokenizer.tokenize(texts, kind, truncate=False)]
        )

    scores = vectors(QUESTIONS, InputKind.QUERY) @ vectors(PASSAGES, InputKind.DOCUMENT).T
    assert scores.argmax(axis=1).tolist() == [0, 1, 2]
    english_over_chinese = scores[0, 1] > max(scores[0, 2], scores[0, 4])
    assert english_over_chinese, "the Chinese twin of the English question's passage ranks before strangers"


@pytest.mark.parametrize("model", ["e5", "minilm"])
def test_a_vector_does_not_depend_on_its_neighbours_bit_for_bit(
    model: str, request: pytest.FixtureRequest
) -> None:
    encoder: OnnxEncoder = request.getfixturevalue(f"{model}_encoder")
    rng = random.Random(5)
    rows = [
        np.array([0, *(rng.randrange(1000, 20_000) for _ in range(rng.randint(1, 48))), 2], np.int64)
        for _ in range(24)
    ]
    alone = np.vstack([encoder.encode([row]) for row in rows])
    assert usable_rows(alone).all()
    for _ in range(100):
        chosen = rng.sample(range(len(rows)), rng.randint(2, 6))
        assert np.array_equal(encoder.encode([rows[index] for index in chosen]), alone[chosen])


def test_a_provider_that_is_not_there_is_refused_and_not_replaced(minilm_files: ModelFiles) -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(ModelFilesError, match="CUDAExecutionProvider"):
        OnnxEncoder(minilm_files, "cuda")


@pytest.mark.cuda
def test_cuda_gives_the_vectors_of_the_cpu(minilm_files: ModelFiles, minilm_encoder: OnnxEncoder) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs ONNX Runtime with CUDA")
    row = np.arange(1000, 1064, dtype=np.int64)
    encoder = OnnxEncoder(minilm_files, "cuda")
    assert encoder.providers[0] == "CUDAExecutionProvider"
    assert float((encoder.encode([row]) @ minilm_encoder.encode([row]).T).item()) > 0.999
