"""What happens around every server call: span, language, errors to statuses, one log line.

Health and reflection pass untouched. A cancelled call stays cancelled: the exception goes
through as it is, and gRPC tells the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from shared import telemetry
from shared.errors import InternalError, ReadymarkError
from shared.rpc import language, status
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)

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
        call = _Call(method, context)
        token = otel_context.attach(trace.set_span_in_context(call.span, otel_context.Context()))
        try:
            response = await behaviour(request, context)
            call.end(context.code() or grpc.StatusCode.OK)
        except asyncio.CancelledError:
            call.end(grpc.StatusCode.CANCELLED)
            raise
        except grpc.aio.AbortError:
            call.end(_code_of(context))
            raise
        except Exception as error:  # noqa: BLE001
            await call.abort(error)
        else:
            return response
        finally:
            otel_context.detach(token)

    return handle


def _streaming(
    method: str, behaviour: Callable[..., AsyncIterator[Any]]
) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
        call = _Call(method, context)
        # The context is not attached: a generator that is left early is closed in another
        # context, where the token could not be given back. The handler gets the span's
        # context by running each step inside it.
        carried = _CarriedSteps(behaviour(request, context), call.span)
        try:
            async for response in carried:
                yield response
            call.end(context.code() or grpc.StatusCode.OK)
        except (asyncio.CancelledError, GeneratorExit):
            call.end(grpc.StatusCode.CANCELLED)
            raise
        except grpc.aio.AbortError:
            call.end(_code_of(context))
            raise
        except Exception as error:  # noqa: BLE001
            await call.abort(error)
        finally:
            await carried.aclose()

    return handle


class _CarriedSteps:
    """Drives an async iterator with `span` as the current one during each step."""

    def __init__(self, steps: AsyncIterator[Any], span: Span) -> None:
        self._steps = steps
        self._context = trace.set_span_in_context(span, otel_context.Context())

    def __aiter__(self) -> _CarriedSteps:
        return self

    async def __anext__(self) -> Any:
        token = otel_context.attach(self._context)
        try:
            return await anext(self._steps)
        finally:
            otel_context.detach(token)

    async def aclose(self) -> None:
        close = getattr(self._steps, "aclose", None)
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

    async def abort(self, error: Exception) -> NoReturn:
        """Answers with the status of `error`; what is not ours is logged and shown as INTERNAL."""
        known = error if isinstance(error, ReadymarkError) else self._unforeseen(error)
        code = status.code_of(known)
        self._reason = known.reason
        self.end(code)
        details = status.to_rpc_status(known, self._language)
        trailing = (
            ("grpc-status-details-bin", details.SerializeToString()),
            *status.trailing_metadata(known),
        )
        await self._context.abort(code, details.message, trailing)
        raise AssertionError("abort does not return")

    def _unforeseen(self, error: Exception) -> ReadymarkError:
        trace_id = f"{self.span.get_span_context().trace_id:032x}"
        _logger.error("unforeseen error in %s", self._method, exc_info=error)
        return InternalError("INTERNAL", trace_id=trace_id)

    def end(self, code: grpc.StatusCode | int) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        name = code.name if isinstance(code, grpc.StatusCode) else str(code)
        self.span.set_attribute("rpc.response.status_code", name)
        if code in _SERVER_FAULTS:
            self.span.set_attribute("error.type", self._reason or name)
            self.span.set_status(Status(StatusCode.ERROR, self._reason or name))
        milliseconds = round((time.monotonic() - self._began) * 1000, 1)
        level = logging.WARNING if code in _SERVER_FAULTS else logging.INFO
        fields: dict[str, Any] = {"method": self._method, "code": name, "duration_ms": milliseconds}
        if self._reason is not None:
            fields["reason"] = self._reason
        with trace.use_span(self.span):
            log_event(_logger, "call ended", level, **fields)
        self.span.end()


def _code_of(context: Context) -> grpc.StatusCode:
    # A handler that aborted by itself has set the code.
    number = context.code()
    for code in grpc.StatusCode:
        if number in (code, code.value[0]):
            return code
    return grpc.StatusCode.UNKNOWN
