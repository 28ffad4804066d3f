"""Messages become values without losing what they say or inventing what they do not."""

from __future__ import annotations

import json

from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from readymark.common.v1 import types_pb2
from readymark.ingest.v1 import ingest_service_pb2 as pb
from readymark.search.v1 import search_service_pb2 as search_pb2
from readymark_client import DocumentStatus, Locator, to_json, wire


def test_a_status_of_a_newer_release_is_unknown_and_breaks_nothing():
    message = pb.Document.FromString(pb.Document(document_id="d").SerializeToString() + b"\x50\x63")
    document = wire.document(message)
    assert document.status is DocumentStatus.UNKNOWN
    assert not document.status.is_settled


def test_what_is_not_set_is_none_and_not_the_year_1970():
    document = wire.document(pb.Document(document_id="d"))
    assert (document.ready_at, document.failure, document.progress, document.served_version) == (None,) * 4


def test_progress_of_nothing_is_none():
    document = wire.document(pb.Document(document_id="d", progress=pb.Progress(unit="chunks")))
    assert document.progress is None
    half = wire.document(pb.Document(progress=pb.Progress(done_units=3, total_units=6, unit="chunks")))
    assert (half.progress.done, half.progress.total, half.progress.unit) == (3, 6, "chunks")


def test_a_stored_failure_keeps_sentence_and_facts():
    detail = any_pb2.Any()
    detail.Pack(
        error_details_pb2.ErrorInfo(
            reason="TOO_MANY_PAGES",
            domain="readymark",
            metadata={"code": "INVALID_DOCUMENT", "actual": "9", "limit": "5"},
        )
    )
    sentence = any_pb2.Any()
    sentence.Pack(error_details_pb2.LocalizedMessage(locale="zh", message="文件共 9 页"))
    failure = wire.failure(
        types_pb2.Failure(
            status=status_pb2.Status(message="The file has 9 pages", details=[detail, sentence]),
            code="INVALID_DOCUMENT",
            reason="TOO_MANY_PAGES",
            stage="PARSING",
        )
    )
    assert failure.message == "文件共 9 页"
    assert failure.parameters == {"actual": "9", "limit": "5"}


def test_ranks_are_there_with_explain_only():
    plain = search_pb2.SearchResponse(hits=[search_pb2.Hit(chunk_id="c")])
    explained = search_pb2.SearchResponse(
        hits=[search_pb2.Hit(chunk_id="c", vector_rank=1, vector_score=0.0)]
    )
    assert wire.search_result(plain).hits[0].vector_rank is None
    hit = wire.search_result(explained).hits[0]
    assert (hit.vector_rank, hit.vector_score, hit.keyword_rank) == (1, 0.0, None)


def test_every_value_is_plain_json():
    document = wire.document(pb.Document(document_id="d", status=pb.DOCUMENT_STATUS_READY))
    assert json.loads(json.dumps(to_json(document)))["status"] == "READY"


def test_a_locator_reads_like_a_place():
    assert (
        str(Locator(heading_path=("Leave", "Vacation"), start_line=3, end_line=9))
        == "Leave > Vacation, lines 3-9"
    )
    assert str(Locator(page=2, end_page=2)) == "p. 2"
    assert str(Locator(sheet="Q1", cell_range="A1:C9")) == "Q1!A1:C9"
    assert str(Locator(start_char=5, end_char=8)) == "characters 5-8"
