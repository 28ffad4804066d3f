"""What chunking costs beside the tokenizer: `python -m tests.benchmarks.chunk_speed --json`.

The chunker tokenizes everything twice, once to cut and once to verify, so at best it runs
at half the speed of one pure pass. Both are measured in the same run, in CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time

import tokenizers

from services.ingest.chunking import Chunker
from services.ingest.model import ParsedDocument
from services.ingest.parsing.accepted import MediaType
from services.ingest.parsing.builder import DocumentBuilder
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.markdown import parse_markdown
from tests.support.tokenizer_files import E5_UNKNOWN_TOKEN_ID, tokenizer_json

_CHARACTERS = 300_000
_LIMIT = 0.3
_ROUNDS = 5
_CHINESE = re.compile(r"[\u4e00-\u9fff]{1,4}")
_LATIN = re.compile(r"\u2581[a-z]{2,12}")


def make_document() -> ParsedDocument:
    """Returns a made-up handbook in Chinese and English, the same in every run.

    Of words that the model knows, rare ones too: a small vocabulary would sit in the tokenizer's cache.
    """
    dice = random.Random(7)
    vocabulary = sorted(tokenizers.Tokenizer.from_buffer(tokenizer_json()).get_vocab())
    chinese = [word for word in vocabulary if _CHINESE.fullmatch(word)]
    latin = [word[1:] for word in vocabulary if _LATIN.fullmatch(word)]
    parts: list[str] = []
    length = 0
    while length < _CHARACTERS:
        heading = f"## {len(parts)} {dice.choice(chinese)}"
        sentences = []
        for _ in range(dice.randint(4, 12)):
            if dice.random() < 0.6:
                sentences.append("".join(dice.choices(chinese, k=dice.randint(5, 16))) + "。")
            else:
                sentences.append(" ".join(dice.choices(latin, k=dice.randint(6, 18))).capitalize() + ". ")
        parts += [heading, "".join(sentences)]
        length += len(heading) + sum(map(len, sentences))
    builder = DocumentBuilder(MediaType.MARKDOWN, ParseLimits())
    parse_markdown("\n\n".join(parts), builder)
    return builder.build()


def measure() -> dict[str, float]:
    # Threads that wait for work count as CPU time too; on a busy machine that is all one sees.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    document = make_document()
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json())
    paragraphs = [block for block in document.text.split("\n\n") if block]
    chunker = Chunker(
        tokenizer_json(),
        max_tokens=512,
        overlap_tokens=48,
        document_overhead_tokens=5,
        unknown_token_id=E5_UNKNOWN_TOKEN_ID,
        model_fingerprint="benchmark",
    )
    pure, chunking, tokens = [], [], 0
    for _ in range(_ROUNDS):
        start = time.process_time()
        tokens = sum(len(item) for item in tokenizer.encode_batch_fast(paragraphs, add_special_tokens=False))
        pure.append(time.process_time() - start)
        start = time.process_time()
        chunks = chunker.split(document, "00000000-0000-0000-0000-000000000001")
        chunking.append(time.process_time() - start)
        assert chunks
    return {"pure": tokens / min(pure), "chunker": tokens / min(chunking)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true", help="one line of JSON at the end")
    wants_json = arguments.parse_args().json
    rates = measure()
    ratio = rates["chunker"] / rates["pure"]
    print(f"tokenizer alone {rates['pure']:,.0f} tokens per CPU second, chunker {rates['chunker']:,.0f}")
    if wants_json:
        print(
            json.dumps(
                {
                    "name": "chunk_speed",
                    "ratio": round(ratio, 3),
                    "limit": _LIMIT,
                    "value": round(rates["chunker"]),
                    "against": f"one tokenizer pass alone: {rates['pure']:.0f} tokens per CPU second",
                }
            )
        )


if __name__ == "__main__":
    main()
