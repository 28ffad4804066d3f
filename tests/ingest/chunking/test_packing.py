"""What stands together in a chunk, what is repeated, and what is in front of it."""

from __future__ import annotations

import itertools

from services.ingest.model import BlockKind
from tests.support.chunking import build, markdown, split, tokenizer


def test_sentences_stay_whole_in_both_languages() -> None:
    sentences = []
    for number in range(40):
        sentences.append(f"第{number}次备份已经完成，请检查日志（见“说明”）。”")
        sentences.append(f"Dr. Smith ran e.g. backup {number} at 3.15 p.m. on time. ")
    document = build((BlockKind.PARAGRAPH, "".join(sentences)))
    for chunk in split(document):
        assert chunk.content.startswith(("第", "Dr."))
        assert chunk.content.endswith(("”", "time."))


def test_overlap_is_whole_sentences_of_the_same_section_within_its_limit() -> None:
    text = "".join(f"这是第{number}句话内容。" for number in range(60))
    document = markdown(f"# 一\n\n{text}\n\n# 二\n\n{text}")
    chunks = split(document, overlap_tokens=20)
    repeated = 0
    for before, after in itertools.pairwise(chunks):
        overlap = document.text[after.locator.start_char : before.locator.end_char]
        if before.locator.heading_path != after.locator.heading_path:
            assert after.locator.start_char >= before.locator.end_char
        elif overlap:
            repeated += 1
            assert overlap.startswith("这是第") and overlap.endswith("。")
            assert len(tokenizer().encode(overlap, add_special_tokens=False)) <= 20
    assert repeated > 4


def test_no_overlap_means_none() -> None:
    text = "".join(f"这是第{number}句话内容。" for number in range(60))
    chunks = split(build((BlockKind.PARAGRAPH, text)), overlap_tokens=0)
    assert all(a.locator.end_char <= b.locator.start_char for a, b in itertools.pairwise(chunks))


def test_a_heading_stands_once_in_what_is_embedded() -> None:
    body = "".join(f"这是第{number}句话内容。" for number in range(60))
    document = markdown(f"# 手册\n\n## 安装步骤\n\n{body}\n\n## 空的一节\n")
    chunks = split(document)
    assert chunks[0].content.startswith("手册\n\n安装步骤\n\n这是第0句")
    assert (chunks[0].prefix, chunks[1].prefix) == ("", "手册 > 安装步骤\n\n")
    for chunk in chunks[:-1]:
        assert chunk.locator.heading_path == ("手册", "安装步骤")
        assert chunk.embed_text.count("安装步骤") == 1
    # A section without a body is found by its title all the same.
    last = chunks[-1]
    assert (last.content, last.kind, last.prefix) == ("空的一节", BlockKind.HEADING, "手册\n\n")


def test_a_chunk_never_mixes_two_sections() -> None:
    document = markdown("# A\n\nshort a.\n\n# B\n\nshort b.")
    assert [chunk.content for chunk in split(document)] == ["A\n\nshort a.", "B\n\nshort b."]


def test_a_heading_path_takes_at_most_a_quarter_and_loses_its_outer_titles() -> None:
    titles = [f"第{level}层标题，写得相当长以便超过四分之一的预算" for level in range(1, 6)]
    head = "\n\n".join("#" * (level + 1) + " " + title for level, title in enumerate(titles))
    chunks = split(markdown(head + "\n\n" + "内容在这里。" * 80), max_tokens=128)
    prefix = chunks[-1].prefix
    assert prefix.startswith("… > ") and prefix.endswith(titles[-1] + "\n\n")
    assert len(tokenizer().encode(prefix, add_special_tokens=False)) <= 128 // 4


def test_every_part_of_a_long_table_has_its_header_and_caption_once() -> None:
    header = "| 型号 | 重量 |\n| --- | --- |\n"
    rows = "".join(f"| 型号{number} | {number}公斤 |\n" for number in range(200))
    document = markdown(f"# 规格\n\n正文在前。\n\n表 1：规格\n\n{header}{rows}\n正文在后。")
    chunks = split(document)
    tables = [chunk for chunk in chunks if chunk.kind is BlockKind.TABLE or "| 型号" in chunk.content]
    assert len(tables) > 5
    for chunk in tables:
        text = chunk.embed_text
        assert text.count("| 型号 | 重量 |\n| --- | --- |\n|") == 1
        assert text.count("表 1：规格") == 1
        table = text[text.index("| 型号 | 重量 |") :]
        assert "\n\n" not in table
        assert all(line.startswith("| ") and line.endswith(" |") for line in table.split("\n"))
        assert "正文" not in text
    found = [row for row in rows.splitlines() if any(row in chunk.content.split("\n") for chunk in tables)]
    assert found == rows.splitlines()


def test_a_small_table_stays_whole() -> None:
    document = markdown("Before.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nAfter.")
    assert [chunk.content for chunk in split(document)] == [
        "Before.",
        "| a | b |\n| --- | --- |\n| 1 | 2 |",
        "After.",
    ]


def test_a_row_or_header_wider_than_a_chunk_is_cut_at_its_cells() -> None:
    wide = "| " + " | ".join(f"单元格内容{number}" for number in range(120)) + " |"
    rule = "| " + " | ".join("---" for _ in range(120)) + " |"
    chunks = split(markdown(f"{wide}\n{rule}\n{wide}\n"))
    assert len(chunks) > 4


def test_code_is_cut_between_lines_and_keeps_its_indent() -> None:
    lines = [f"    value_{number} = compute({number})" for number in range(80)]
    document = markdown("```python\n" + "\n".join(lines) + "\n```")
    chunks = split(document)
    assert "\n".join(chunk.content for chunk in chunks).split("\n") == lines
    assert [chunk.locator.start_line for chunk in chunks] == [
        2 + lines.index(chunk.content.split("\n")[0]) for chunk in chunks
    ]
