"""What happens around every server call: span, language, errors to statuses, metric, one log line.

Health and reflection pass untouched. A cancelled call stays cancelled: the exception goes
through as it is, and gRPC tells the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from shared import telemetry
from shared.errors import InternalError, ReadymarkError
from shared.rpc import language, status
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

_UNOBSERVED = ("/grpc.health.", "/grpc.reflection.")
# Statuses that are the server's fault; the others are answers.
_SERVER_FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_duration = telemetry.meter().create_histogram(
    "rpc.server.call.duration",
    "s",
    "Duration of calls, by method and status.",
    explicit_bucket_boundaries_advisory=telemetry.CALL_SECONDS,
)
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the four kinds of handlers."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_UNOBSERVED):
            return handler
        kinds: dict[tuple[bool, bool], tuple[Any, Any, Any]] = {
            (False, False): (grpc.unary_unary_rpc_method_handler, _answering, handler.unary_unary),
            (True, False): (grpc.stream_unary_rpc_method_handler, _answering, handler.stream_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, _streaming, handler.unary_stream),
            (True, True): (grpc.stream_stream_rpc_method_handler, _streaming, handler.stream_stream),
        }
        wrap_as, wrapped_by, behaviour = kinds[handler.request_streaming, handler.response_streaming]
        return wrap_as(
            wrapped_by(method, behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _answering(method: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def handle(request: Any, context: Context) -> Any:
        return await _Call(method, context).run(behaviour(request, context))

    return handle


def _streaming(method: str, behaviour: Callable[..., AsyncIterator[Any]]) -> Callable[..., Awaitable[None]]:
    # Written as a coroutine, not as a generator: gRPC cancels the task, and a generator that
    # waits in `yield` for a slow reader would learn of it only from the garbage collector.
    async def handle(request: Any, context: Context) -> None:
        await _Call(method, context).run(_write_all(behaviour(request, context), context))

    return handle


async def _write_all(responses: AsyncIterator[Any], context: Context) -> None:
    try:
        async for response in responses:
            await context.write(response)
    finally:
        close = getattr(responses, "aclose", None)
        if close is not None:
            await close()


class _Call:
    """One call from its first to its last moment."""

    def __init__(self, method: str, context: Context) -> None:
        self._method = method.lstrip("/")
        self._context = context
        self._began = time.monotonic()
        self._reason: str | None = None
        self._is_ended = False
        metadata = context.invocation_metadata() or ()
        self._language = language.language_of(metadata)
        language.use_language(self._language)
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        parent = telemetry.remote_context(carrier.get("traceparent"), carrier.get("tracestate"))
        self.span = telemetry.tracer().start_span(
            self._method,
            parent,
            SpanKind.SERVER,
            {"rpc.system.name": "grpc", "rpc.method": self._method},
        )
        # Never detached: gRPC runs each call in a task, whose context ends with it.
        otel_context.attach(trace.set_span_in_context(self.span, otel_context.Context()))

    async def run(self, work: Awaitable[Answer]) -> Answer:
        """Awaits the handler; however it ends, the client gets a status and the span ends with the same."""
        try:
            answer = await work
            self._end(_code_of(self._context))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self._end(self._code_of_cancellation())
                raise
            # Not the call was cancelled but something in the handler: gRPC would send nothing
            # at all, and the client would wait for ever.
            await self._abort(error)
        except grpc.aio.AbortError:
            self._end(_code_of(self._context))
            raise
        except Exception as error:  # noqa: BLE001
            await self._abort(error)
        finally:
            # Only a loop that is torn down gets here without an end.
            self._end(grpc.StatusCode.CANCELLED)
        return answer

    async def _abort(self, error: BaseException) -> NoReturn:
        """Answers with the status of `error`; what is not ours is logged and shown as INTERNAL."""
        known = error if isinstance(error, ReadymarkError) else self._unforeseen(error)
        code = status.code_of(known)
        self._reason = known.reason
        self._end(code)
        details = status.to_rpc_status(known, self._language)
        trailing = (
            ("grpc-status-details-bin", details.SerializeToString()),
            *status.trailing_metadata(known),
        )
        await self._context.abort(code, details.message, trailing)
        raise AssertionError("abort does not return")

    def _unforeseen(self, error: BaseException) -> ReadymarkError:
        trace_id = f"{self.span.get_span_context().trace_id:032x}"
        _logger.error("unforeseen error in %s", self._method, exc_info=error)
        return InternalError("INTERNAL", trace_id=trace_id)

    def _code_of_cancellation(self) -> grpc.StatusCode:
        # gRPC cancels the handler for both; the client saw the deadline pass first.
        left = self._context.time_remaining()
        is_late = left is not None and left <= 0
        return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED

    def _end(self, code: grpc.StatusCode) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        seconds = time.monotonic() - self._began
        labels = {"rpc.method": self._method, "rpc.response.status_code": code.name}
        self.span.set_attribute("rpc.response.status_code", code.name)
        if code in _SERVER_FAULTS:
            labels["error.type"] = self._reason or code.name
            self.span.set_attribute("error.type", self._reason or code.name)
            self.span.set_status(Status(StatusCode.ERROR, self._reason or code.name))
        fields: dict[str, Any] = {
            "method": self._method,
            "code": code.name,
            "duration_ms": round(seconds * 1000, 1),
        }
        if self._reason is not None:
            fields["reason"] = self._reason
        with trace.use_span(self.span):
            _duration.record(seconds, labels)
            level = logging.WARNING if code in _SERVER_FAULTS else logging.INFO
            log_event(_logger, "call ended", level, **fields)
        self.span.end()


def _code_of(context: Context) -> grpc.StatusCode:
    """Returns the code that the handler has set or aborted with; OK when it did neither."""
    number = context.code()
    if isinstance(number, grpc.StatusCode):
        return number
    return _CODES.get(number or 0, grpc.StatusCode.UNKNOWN)
