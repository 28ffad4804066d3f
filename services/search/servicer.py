"""The gRPC face of search: translates in, asks once, translates out."""

from __future__ import annotations

import grpc
from readymark.search.v1 import search_service_pb2 as messages
from readymark.search.v1 import search_service_pb2_grpc as contract

from services.search import wire
from services.search.retrieval import Searcher


class SearchServicer(contract.SearchServiceServicer):
    """`default_timeout_seconds` is for calls that come without a deadline."""

    def __init__(
        self, searcher: Searcher, *, default_timeout_seconds: float, max_query_characters: int
    ) -> None:
        self._searcher = searcher
        self._default_timeout_seconds = default_timeout_seconds
        self._max_query_characters = max_query_characters

    async def Search(  # noqa: N802
        self,
        request: messages.SearchRequest,
        context: grpc.aio.ServicerContext[messages.SearchRequest, messages.SearchResponse],
    ) -> messages.SearchResponse:
        query = wire.to_query(request, max_characters=self._max_query_characters)
        remaining_seconds = context.time_remaining()
        if remaining_seconds is None:
            remaining_seconds = self._default_timeout_seconds
        result = await self._searcher.search(query, remaining_seconds)
        return wire.to_response(query, result)
