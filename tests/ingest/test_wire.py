"""Values to messages and back: nothing is lost, and sentences come in the reader's language."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2
from readymark.ingest.v1 import ingest_service_pb2 as pb

from services.ingest import wire
from services.ingest.header import DuplicatePolicy
from services.ingest.lifecycle import DocumentStatus, JobStatus
from shared.errors import InvalidArgumentError

STORED: dict[str, Any] = {
    "code": "UNAVAILABLE",
    "reason": "EMBEDDER_UNAVAILABLE",
    "parameters": {},
    "stage": "EMBEDDING",
    "attempt": 1,
    "max_attempts": 3,
    "retryable": True,
    "occurred_at": "2024-05-06T07:08:09.123456+00:00",
    "next_attempt_at": "2024-05-06T07:08:19.123456+00:00",
}


def details(message: Any) -> list[Any]:
    found = []
    for packed in message.status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.LocalizedMessage):
            if packed.Is(kind.DESCRIPTOR):
                detail = kind()
                packed.Unpack(detail)
                found.append(detail)
    return found


def test_a_failure_that_will_be_retried_says_so_in_english_and_chinese() -> None:
    english, chinese = wire.failure(STORED, "en"), wire.failure(STORED, "zh")
    assert english.status.message.startswith(
        "Attempt 1 of 3 failed for now and will be retried: The embedder"
    )
    assert chinese.status.message.startswith("第 1/3 次处理暂时失败，系统将自动重试：向量化服务")
    assert (english.code, english.reason, english.stage) == (
        "UNAVAILABLE",
        "EMBEDDER_UNAVAILABLE",
        "EMBEDDING",
    )
    assert english.retryable
    assert english.next_attempt_time.ToJsonString() == "2024-05-06T07:08:19.123456Z"


def test_a_final_failure_carries_reason_and_facts_as_a_synchronous_error_would() -> None:
    stored = STORED | {
        "code": "INVALID_DOCUMENT",
        "reason": "TOO_MANY_PAGES",
        "parameters": {"actual": "9", "limit": "5"},
        "retryable": False,
        "next_attempt_at": None,
    }
    message = wire.failure(stored, "zh")
    info, localized = details(message)
    assert (info.reason, info.domain) == ("TOO_MANY_PAGES", "readymark")
    assert (info.metadata["actual"], info.metadata["limit"]) == ("9", "5")
    assert localized.message == message.status.message == "文件共 9 页，上限为 5 页；请拆分文件。"
    assert not message.HasField("next_attempt_time")


@pytest.mark.parametrize("code", ["CANCELLED", "LEASE_EXPIRED", "A_KIND_OF_A_NEWER_RELEASE"])
def test_failures_that_nobody_raises_are_shown_too(code: str) -> None:
    message = wire.failure(STORED | {"code": code, "reason": "CANCELLED", "retryable": False}, "en")
    assert (message.code, message.reason) == (code, "CANCELLED")
    assert message.status.code != 0


def test_a_warning_comes_in_the_readers_language() -> None:
    stored = {"reason": "PAGE_WITHOUT_TEXT", "parameters": {"page": "3"}, "page": 3}
    assert wire.warning(stored, "zh").message.startswith("第 3 页没有文字层")
    assert wire.warning({"reason": "CJK_FONT_MISSING"}, "en").page == 0


def test_every_status_and_policy_has_its_value_in_the_contract() -> None:
    for status in DocumentStatus:
        assert wire.document_status(pb.DocumentStatus.Value(f"DOCUMENT_STATUS_{status}")) is status
    assert len(pb.DocumentStatus.values()) == len(DocumentStatus) + 1
    job_statuses = pb.IngestionJobStatus.DESCRIPTOR.values
    assert {value.name.removeprefix("INGESTION_JOB_STATUS_") for value in job_statuses} == {
        "UNSPECIFIED",
        *JobStatus,
    }
    for policy in DuplicatePolicy:
        header = pb.DocumentHeader(duplicate_policy=pb.DuplicatePolicy.Value(f"DUPLICATE_POLICY_{policy}"))
        assert wire.document_header(header).duplicate_policy is policy
    assert wire.document_status(pb.DOCUMENT_STATUS_UNSPECIFIED) is None


def test_a_policy_that_this_release_does_not_know_is_not_guessed() -> None:
    header = pb.DocumentHeader()
    json_format.ParseDict({"duplicatePolicy": 99}, header)
    with pytest.raises(InvalidArgumentError) as refused:
        wire.document_header(header)
    assert refused.value.parameters == {"field": "duplicate_policy", "problem": "UNKNOWN_VALUE"}


def test_whole_numbers_of_metadata_stay_whole() -> None:
    header = pb.DocumentHeader()
    header.metadata.update({"year": 2024, "share": 0.5, "big": 1e300, "none": None, "list": [1, {"a": True}]})
    metadata = wire.document_header(header).metadata
    assert metadata == {"year": 2024, "share": 0.5, "big": 1e300, "none": None, "list": [1, {"a": True}]}
    assert isinstance(metadata["year"], int)
