"""Routes of a server, as OpenAI's and vLLM's users know them."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from distca.inference.messages import AddRequest
from distca.schedule.serving.cdsp import ImprovementRates
from distca.schedule.serving.cdsp.load import Growth
from distca.serve.api.answers import Job, Shape
from distca.serve.api.engine_client import AnswerError, EngineClient, EngineError, RefusedError
from distca.serve.api.errors import ApiError, add_handlers
from distca.serve.api.guard import Guard
from distca.serve.api.metrics import Metrics
from distca.serve.api.model import ApiModel
from distca.serve.api.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampled,
    TokenizeBody,
)

_BYTES_PER_TOKEN = 64
_LEAST_BODY = 1 << 20
_REQUESTS_KEPT = 256


@dataclass(frozen=True)
class Bounds:
    """Bounds of what a server takes in.

    Attributes:
        sequences: most sequences that are answered or wait, beyond which requests get a 429.
        keys: API keys; none: all requests are let in.
    """

    sequences: int
    keys: tuple[str, ...]


def make_app(model: ApiModel, client: EngineClient, metrics: Metrics, bounds: Bounds) -> FastAPI:
    """Makes the app of a server.

    Args:
        model: model that answers.
        client: engine.
        metrics: numbers of the server.
        bounds: bounds of what it takes in.
    """
    app = FastAPI(title="distca serve", docs_url=None, redoc_url=None)
    add_handlers(app)
    most_bytes = max(_LEAST_BODY, _BYTES_PER_TOKEN * model.positions)
    app.add_middleware(Guard, keys=bounds.keys, most_bytes=most_bytes)
    routes = _Routes(model, client, metrics, bounds)
    app.get("/", response_class=HTMLResponse)(routes.page)
    app.get("/health")(routes.health)
    app.get("/metrics")(routes.metrics)
    app.get("/v1/models")(routes.models)
    app.post("/v1/completions")(routes.completions)
    app.post("/v1/chat/completions")(routes.chat)
    app.post("/tokenize")(routes.tokenize)
    app.post("/detokenize")(routes.detokenize)
    app.post("/reset_prefix_cache")(routes.reset_prefix_cache)
    app.get("/improvement_rates")(routes.rates)
    app.post("/improvement_rates")(routes.set_rates)
    app.get("/debug/state")(routes.state)
    app.get("/debug/plan/{request_id}")(routes.plan)
    return app


class _Routes:
    """The routes, as methods."""

    def __init__(
        self, model: ApiModel, client: EngineClient, metrics: Metrics, bounds: Bounds
    ) -> None:
        self._model, self._client, self._metrics = model, client, metrics
        self._bounds = bounds
        self._requests: OrderedDict[str, list[int]] = OrderedDict()

    async def page(self) -> str:
        """A page to chat with the model, and to watch ranks, blocks and iterations."""
        return files("distca.serve.api").joinpath("page.html").read_text(encoding="utf-8")

    async def health(self) -> Response:
        """Whether the engine is alive."""
        return Response(status_code=200 if self._client.dead is None else 503)

    async def metrics(self) -> Response:
        """Numbers for Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> dict[str, Any]:
        """The model that is served."""
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": 0,
                    "owned_by": "distca",
                    "max_model_len": self._model.positions,
                }
                for name in self._model.names
            ],
        }

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Goes on with prompts."""
        self._model.check_name(body.model)
        prompts = await self._prompts(body)
        submits: list[AddRequest] = []
        echoes: list[str] = []
        # OpenAI's default.
        most = body.max_tokens or self._model.defaults.get("max_new_tokens") or 16
        for tokens, text in prompts:
            self._model.check_tokens(tokens, "prompt")
            scored = bool(body.echo) and body.logprobs is not None
            each = self._model.submits(body, tokens, most, body.logprobs, scored)
            submits += each
            echoes += [text if body.echo else ""] * len(each)
        return await self._answer(request, body, "completion", submits, echoes)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        self._model.check_name(body.model)
        tokens = await self._model.encode_chat(body.messages)
        self._model.check_tokens(tokens, "messages")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        most = body.max_completion_tokens or body.max_tokens
        submits = self._model.submits(body, tokens, most, logprobs)
        return await self._answer(request, body, "chat", submits, [""] * len(submits))

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Tokens of a text or of a conversation."""
        self._model.check_name(body.model)
        if body.messages is not None:
            tokens = await self._model.encode_chat(body.messages)
        else:
            tokens = await self._model.encode(body.prompt or "", body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._model.positions}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, str]:
        """Text of tokens."""
        self._model.check_name(body.model)
        self._model.check_vocabulary(body.tokens, "tokens")
        return {"prompt": await self._model.decode(body.tokens)}

    async def reset_prefix_cache(self) -> Response:
        """Forgets all blocks that no sequence holds, and that others do once they end."""
        try:
            await self._client.reset_cache()
        except EngineError as error:
            raise ApiError(503, str(error)) from error
        return Response()

    async def rates(self) -> dict[str, Any]:
        """The improvement rates of prefills, and the one for the load now."""
        return await self._rates(None)

    async def set_rates(self, body: dict[str, Growth]) -> dict[str, Any]:
        """Sets them: an object of improvement rates by arrivals a second, each alone or in a list
        with the most ranks of a group."""
        try:
            rates = ImprovementRates({float(key): value for key, value in body.items()})
        except ValueError as error:
            raise ApiError(400, f"{error}, as {{'0.5': 0.05, '4': [0.45, 8]}}") from error
        return await self._rates(dict(rates.by_arrivals))

    async def _rates(self, given: dict[float, Growth] | None) -> dict[str, Any]:
        if self._client.settings.roles is None:
            raise ApiError(404, "there are no prefill ranks: start the server with --prefill-ranks")
        try:
            found = await self._client.rates(given)
        except EngineError as error:
            raise ApiError(503, str(error)) from error
        return {
            "arrivals_per_second": found.arrivals,
            "improvement_rate": found.rate,
            "most_ranks": found.most_ranks,
            "by_arrivals_per_second": found.by_arrivals,
        }

    async def state(self) -> dict[str, Any]:
        """Numbers of the engine, and of each rank, as of the last iteration."""
        stats = self._client.stats
        assert stats is not None, "the engine has started"
        return {
            **{name: getattr(stats, name) for name in stats.__struct_fields__ if name != "ranks"},
            "block_size": self._client.settings.block_size,
            "block_bytes": self._client.block_bytes,
            "ranks": [msgspec.structs.asdict(rank) for rank in stats.ranks],
        }

    async def plan(self, request_id: str) -> JSONResponse:
        """The plan of the last chunk of a request's prompt, as `distca plan --save` writes one."""
        numbers = self._requests.get(request_id)
        if numbers:
            saved = await self._client.plan_of(numbers[0])
            if saved is not None:
                return JSONResponse(json.loads(saved))
        raise ApiError(
            404,
            f"there is no plan of {request_id}: give the id of one of the last {_REQUESTS_KEPT} "
            "requests",
        )

    async def _prompts(self, body: CompletionBody) -> list[tuple[list[int], str]]:
        """Tokens and text of each prompt."""
        given: Any = body.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        # Each list of another type than the first's was refused with the body.
        prompts = []
        self._check_room(len(given) * (body.n or 1))
        for each in given:
            if isinstance(each, str):
                prompts.append((await self._model.encode(each, body.add_special_tokens), each))
            else:
                self._model.check_vocabulary(each, "prompt")
                text = await self._model.decode(each) if body.echo else ""
                prompts.append((each, text))
        if not prompts:
            raise ApiError(400, "there are no prompts: give at least one", "prompt")
        return prompts

    def _check_room(self, count: int) -> None:
        """Refuses sequences for which there is no room.

        Raises:
            ApiError: 429, or 400 if there never is.
        """
        if count > self._bounds.sequences:
            raise ApiError(
                400,
                f"{count} answers are asked for at once, and at most {self._bounds.sequences} can "
                "wait: ask for fewer",
            )
        if self._client.outstanding + count > self._bounds.sequences:
            raise ApiError(
                429,
                f"{self._client.outstanding} sequences are being answered or wait: try again later",
                retry_after=1,
            )

    async def _answer(
        self,
        request: Request,
        body: Sampled,
        shape: Shape,
        submits: Sequence[AddRequest],
        echoes: Sequence[str],
    ) -> Response:
        if self._client.dead is not None:
            raise ApiError(503, f"the server ends: {self._client.dead}", retry_after=10)
        self._check_room(len(submits))
        job = Job(self._model, self._client, self._metrics, body, shape, submits, echoes)
        self._requests[job.id] = job.numbers
        while len(self._requests) > _REQUESTS_KEPT:
            self._requests.popitem(last=False)
        if body.stream:
            return StreamingResponse(_closed(job.stream()), media_type="text/event-stream")
        try:
            return JSONResponse(await _unless_gone(request, job.whole()))
        except RefusedError as error:
            raise ApiError(400, str(error)) from error
        except AnswerError as error:
            raise ApiError(500, str(error)) from error
        except EngineError as error:
            raise ApiError(500, f"the server ends: {error}") from error


async def _closed(stream: AsyncIterator[str]) -> AsyncIterator[str]:
    """Passes a stream on, and closes it where its reader leaves."""
    try:
        async for each in stream:
            yield each
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, dict[str, Any]]) -> Any:
    """Waits for an answer, which is given up if the client leaves."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(499, "the client has left")
        return work.result()
    finally:
        for each in (work, gone):
            each.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Waits until the client leaves."""
    message = await request.receive()
    while message["type"] != "http.disconnect":
        message = await request.receive()
