"""Errors over the wire: what is raised on one side is raised on the other."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from shared import errors
from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    ReadymarkError,
    ResourceNotFoundError,
)
from shared.rpc import status
from tests.support.rpc_service import running_server, running_service


def rpc_error(code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


def as_received(error: ReadymarkError, language: str = "en") -> grpc.aio.AioRpcError:
    made = status.to_rpc_status(error, language)
    trailing = [("grpc-status-details-bin", made.SerializeToString())]
    return rpc_error(status.code_of(error), made.message, trailing)


def details_of(error: ReadymarkError, kind: type[Any], language: str = "en") -> list[Any]:
    found = []
    for packed in status.to_rpc_status(error, language).details:
        if packed.Is(kind.DESCRIPTOR):
            found.append(kind())
            packed.Unpack(found[-1])
    return found


def test_every_error_that_can_be_raised_has_a_status():
    assert set(status.STATUS_OF) == set(errors.LEAVES)


def all_subclasses(cls: type) -> set[type]:
    below = set(cls.__subclasses__())
    return below.union(*(all_subclasses(sub) for sub in below)) if below else set()


def test_the_leaves_are_all_the_errors_without_children():
    childless = {cls for cls in all_subclasses(ReadymarkError) if not cls.__subclasses__()}
    assert childless == set(errors.LEAVES)
    assert len(errors.BY_CODE) == len(errors.LEAVES)


@pytest.mark.parametrize("leaf", errors.LEAVES)
@pytest.mark.parametrize("retry_after", [None, 1.25])
def test_an_error_survives_the_way_there_and_back(leaf, retry_after):
    error = leaf("TOO_LARGE", retry_after_seconds=retry_after, actual=5, limit="四")
    back = status.from_rpc_error(as_received(error))
    assert type(back) is leaf
    assert (back.reason, back.parameters) == ("TOO_LARGE", {"actual": "5", "limit": "四"})
    assert back.retry_after_seconds == retry_after
    assert str(back) == str(error)


@pytest.mark.parametrize("leaf", errors.LEAVES)
async def test_an_error_survives_a_real_call(leaf):
    async def do(request: bytes, context: Any) -> bytes:
        raise leaf("TOO_LARGE", retry_after_seconds=0.5, actual=5, limit="四")

    async with running_service({"Do": ("unary_unary", do)}) as stub:
        with pytest.raises(leaf) as caught:
            await stub["Do"](b"")
    assert (caught.value.reason, caught.value.parameters) == ("TOO_LARGE", {"actual": "5", "limit": "四"})
    assert caught.value.retry_after_seconds == 0.5


def test_the_sentence_comes_in_chinese_when_asked_for():
    error = InvalidArgumentError("TOO_LARGE", actual=5, limit=4)
    made = status.to_rpc_status(error, "zh")
    assert made.message == "文件大小为 5 字节，上限为 4 字节；请拆分文件或请管理员提高上限。"
    (localized,) = details_of(error, error_details_pb2.LocalizedMessage, "zh")
    assert (localized.locale, localized.message) == ("zh-CN", made.message)
    assert details_of(error, error_details_pb2.LocalizedMessage)[0].locale == "en-US"


def test_the_field_at_fault_is_named_where_tools_look_for_it():
    error = InvalidArgumentError("FIELD_INVALID", field="page_size")
    (bad_request,) = details_of(error, error_details_pb2.BadRequest)
    assert [violation.field for violation in bad_request.field_violations] == ["page_size"]
    assert details_of(OverloadedError("OVERLOADED"), error_details_pb2.BadRequest) == []


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, DependencyUnavailableError),
        (grpc.StatusCode.CANCELLED, DependencyUnavailableError),
        (grpc.StatusCode.ABORTED, DependencyUnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, OverloadedError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
        (grpc.StatusCode.UNIMPLEMENTED, InternalError),
        (grpc.StatusCode.NOT_FOUND, InternalError),
        (grpc.StatusCode.UNKNOWN, InternalError),
    ],
)
def test_a_status_that_is_not_ours_becomes_the_nearest_error(code, kind):
    back = status.from_rpc_error(rpc_error(code, "proxy says no"))
    assert type(back) is kind
    assert "proxy" not in str(back)


def test_error_details_of_another_domain_are_not_taken_for_ours():
    made = status.to_rpc_status(ResourceNotFoundError("DOCUMENT_NOT_FOUND", document="d"))
    info = error_details_pb2.ErrorInfo(reason="X", domain="googleapis.com", metadata={"code": "LEASE_LOST"})
    made.details[0].Pack(info)
    trailing = [("grpc-status-details-bin", made.SerializeToString())]
    back = status.from_rpc_error(rpc_error(grpc.StatusCode.NOT_FOUND, made.message, trailing))
    assert (type(back), back.reason) == (InternalError, "INTERNAL")


def test_a_kind_that_a_newer_release_added_is_read_by_its_status():
    made = status.to_rpc_status(OverloadedError("OVERLOADED"))
    info = error_details_pb2.ErrorInfo(
        reason="TOO_MANY_CATS", domain="readymark", metadata={"code": "CATS", "retry_after_seconds": "1"}
    )
    made.details[0].Pack(info)
    trailing = [("grpc-status-details-bin", made.SerializeToString())]
    back = status.from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, made.message, trailing))
    assert (type(back), back.reason) == (OverloadedError, "TOO_MANY_CATS")


@pytest.mark.parametrize("garbage", [b"", b"\xff\xff\xff", b"\x08\x05\x12\x03abc"])
def test_details_that_are_garbage_or_contradict_the_code_are_ignored(garbage):
    trailing = [("grpc-status-details-bin", garbage)]
    back = status.from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "x", trailing))
    assert type(back) is DependencyUnavailableError


async def test_a_message_that_is_too_large_is_not_taken_for_overload():
    async def do(request: bytes, context: Any) -> bytes:
        return b"x" * 200_000

    async with running_service({"Do": ("unary_unary", do)}, max_message_bytes=100_000) as stub:
        with pytest.raises(InternalError):
            await stub["Do"](b"x" * 200_000)
        with pytest.raises(InternalError):
            await stub["Do"](b"")


@pytest.mark.parametrize("language", ["en", "zh"])
async def test_facts_of_any_length_do_not_make_the_trailers_too_large_for_a_client(language):
    async def do(request: bytes, context: Any) -> bytes:
        raise InvalidArgumentError("NAME_INVALID", field="字" * 9000, actual="长" * 9000)

    async with (
        running_server({"Do": ("unary_unary", do)}) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Service/Do")(b"", metadata=[("accept-language", language)])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    back = status.from_rpc_error(caught.value)
    assert back.reason == "NAME_INVALID"
    assert back.parameters["field"] == "字" * (status.MAX_FACT_BYTES // 3) + "…"


async def test_a_fact_that_is_no_unicode_does_not_hide_the_error():
    async def do(request: bytes, context: Any) -> bytes:
        raise InvalidArgumentError("NAME_INVALID", field="file\udcff.txt")

    async with running_service({"Do": ("unary_unary", do)}) as stub:
        with pytest.raises(InvalidArgumentError) as caught:
            await stub["Do"](b"")
    assert caught.value.parameters["field"] == "file?.txt"
