"""Answers to requests for text: from bytes to token ids, through the engine, back as one body or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from qsa.config import EngineConfig
from qsa.errors import EngineDeadError
from qsa.serve_app.api_types import (
    ChatRequest,
    CompletionRequest,
    GenerationOptions,
    ModelLimits,
    child_sampling,
    parse_body,
    resolve_options,
)
from qsa.serve_app.errors import ApiError, as_api_error, bad_request, is_foreseen
from qsa.serve_app.generation import Generation, Piece, SequenceFailed, SequenceState, ServingEngine
from qsa.serve_app.metrics import HttpMetrics, plain
from qsa.serve_app.prompts import PromptEncoder, Workers, decode_json
from qsa.serve_app.responses import Answer, Choice, make_usage, to_json
from qsa.serve_app.streaming import KEEP_ALIVE, ClientGone, EventStream, event, run_until_disconnect
from qsa.serve_app.warm_up import WarmUp

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 1.0
STATS_TIMEOUT_S = 5.0
START_WAIT_S = 20.0  # how long a request waits for an engine that is warming up, before it is told to come back


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def error_response(error: BaseException) -> Response:
    answer = as_api_error(error)
    return json_response(answer.body, answer.status, answer.headers)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 beyond `limit`. The rest is read and dropped, to a bound, so that the client gets to see the answer.
        ClientGone: the client left in the middle.
    """
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            chunks.append(part)
        else:
            chunks.clear()
        if not message.get("more_body", False) or size > 4 * limit:
            break
    if size > limit:
        found = request.headers.get("content-length") or f"more than {limit}"
        raise ApiError(413, f"the body has {found} bytes; limits.max_body_bytes allows {limit}", code="body_too_large")
    return b"".join(chunks)


class Api:
    """What the routes share. State: the requests being answered, and whether the server is draining."""

    def __init__(self, engine: ServingEngine, config: EngineConfig, warm_up: WarmUp | None = None) -> None:
        """warm_up: of an engine that is not ready yet."""
        self.engine = engine
        self.config = config
        self._warm_up = warm_up
        self.metrics = HttpMetrics()
        self.workers = Workers()
        self.limits = ModelLimits(
            max_model_len=engine.max_model_len,
            longest_sequence=engine.longest_sequence,
            vocab_size=engine.tokenizer.vocab_size,
            sparse_ids=frozenset(config.sparse),
            default_sparse_id=config.default_sparse_id,
            max_sequences_waiting=config.limits.max_sequences + config.limits.max_waiting,
            default_max_tokens=config.server.default_max_tokens,
        )
        self.encoder = PromptEncoder(engine.tokenizer, engine.tokenizer.vocab_size)
        self.created = int(time.time())
        self.draining = False
        self._running: set[Generation] = set()

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait for those being answered; after `grace_s` end them with an error event."""
        self.draining = True
        deadline = time.monotonic() + grace_s
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for generation in self._running:
            generation.fail(EngineDeadError("the server is shutting down"))
        while self._running and time.monotonic() < deadline + 2:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self.workers.close()

    async def health(self, *, for_traffic: bool) -> Response:
        """The engine's heartbeat as a status; `for_traffic`: also whether new requests are welcome.

        An engine that recovers is not healthy, with the reason, though requests that come all the same are queued.
        """
        warm_up = self._warm_up
        if warm_up is not None and warm_up.reason is not None:
            if for_traffic or warm_up.failed is not None:
                headers = {"Retry-After": "1" if warm_up.failed is None else "5"}
                return error_response(ApiError(503, warm_up.reason, code="engine_unavailable", headers=headers))
            return json_response({"status": warm_up.reason, "heartbeat_age_s": None})
        reason: str | None = None
        age = None
        retry_after = "5"
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                health = await self.engine.health()
            age = plain(getattr(health, "heartbeat_age_s", None))
            reason = None if health.ok else (health.reason or "the engine is not healthy")
            retry_after = "5" if health.is_dead else "2"
        except TimeoutError:
            reason = f"the engine did not answer within {HEALTH_TIMEOUT_S:g} s"
        except Exception as error:
            reason = str(error)
        if reason is None and for_traffic and self.draining:
            reason = "the server is shutting down"
        if reason is not None:
            headers = {"Retry-After": retry_after}
            return error_response(ApiError(503, reason, code="engine_unavailable", headers=headers))
        return json_response({"status": "ok", "heartbeat_age_s": age})

    async def stats(self) -> Any:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await self.engine.stats()

    async def metrics_response(self) -> Response:
        try:
            stats = await self.stats()
        except Exception:  # a dead engine must not hide the counters of HTTP
            stats = None
        return Response(self.metrics.render(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    @property
    def model_names(self) -> set[str]:
        """What a client may call the model: its name, the path it was started with, or `default`."""
        return {self.engine.model_name, self.config.model.path, "default"}

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.engine.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "qsa",
            "max_model_len": self.limits.max_model_len,
        }

    async def answer(self, request: Request, *, is_chat: bool) -> Response:
        """Answer a request for text; every failure becomes OpenAI's envelope."""
        endpoint = "chat" if is_chat else "completions"
        self.metrics.in_flight.inc()
        streams = False
        status = 499
        try:
            response = await self._answer(request, is_chat)
            streams, status = isinstance(response, EventStream), response.status_code
            return response
        except ClientGone:
            self.metrics.disconnects.inc()
            return Response(status_code=499)
        except Exception as error:
            if not is_foreseen(error):
                logger.exception("a request failed")
            response = error_response(error)
            status = response.status_code
            return response
        finally:
            self.metrics.requests.labels(endpoint, str(status)).inc()
            if not streams:
                self.metrics.in_flight.dec()

    async def _answer(self, request: Request, is_chat: bool) -> Response:
        if self.draining:
            raise EngineDeadError("the server is shutting down")
        data = await read_body(request, self.config.limits.max_body_bytes)
        if self._warm_up is not None and self._warm_up.reason is not None:
            await self._warm_up.wait(START_WAIT_S)
        options, prompts = await self.workers.run(len(data), self._prepare, data, is_chat)
        num_top = max(options.sampling.logprobs, 0)
        answer = Answer(
            is_chat=is_chat,
            model=self.engine.model_name,
            seed=options.sampling.seed,
            wants_logprobs=options.sampling.logprobs >= 0,
            num_top=num_top,
        )
        sequences = self._sequences(answer.id, options, prompts, "messages" if is_chat else "prompt")
        generation = Generation(
            self.engine, sequences, stop=options.stop, sparse_id=options.sparse_id, priority=options.priority
        )
        prompt_tokens = sum(map(len, prompts))
        self._running.add(generation)
        handed_over = False
        try:
            await run_until_disconnect(request.receive, generation.start())
            self.metrics.prompt_tokens.inc(prompt_tokens)
            if options.stream:
                events = self._events(answer, generation, options, prompt_tokens)
                handed_over = True
                return EventStream(events, lambda error: self._end_stream(generation, error))
            choices = await run_until_disconnect(request.receive, self._collect(generation))
            return json_response(answer.full(choices, make_usage(generation, prompt_tokens, answer.seed)))
        finally:
            if not handed_over:
                await self._end(generation)

    def _prepare(self, data: bytes, is_chat: bool) -> tuple[GenerationOptions, list[list[int]]]:
        """From bytes to token ids; runs in a thread when there are many."""
        values = decode_json(data)
        body: ChatRequest | CompletionRequest
        if is_chat:
            body = parse_body(ChatRequest, values)
        else:
            body = parse_body(CompletionRequest, values)
        if body.model is not None and body.model not in self.model_names:
            name = body.model[:100]
            message = f"the model {name!r} does not exist; this server has {self.engine.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        options = resolve_options(body, self.limits)
        if isinstance(body, ChatRequest):
            return options, self.encoder.encode_chat(body)
        return options, self.encoder.encode_completion(body)

    def _sequences(
        self, answer_id: str, options: GenerationOptions, prompts: list[list[int]], what: str
    ) -> list[SequenceState]:
        """`n` children of every prompt, in OpenAI's order; child i draws with seed + i."""
        count = options.n * len(prompts)
        if count > self.limits.max_sequences_waiting:
            raise bad_request(
                f"the request asks for {count} sequences; limits.max_sequences and limits.max_waiting allow"
                f" {self.limits.max_sequences_waiting} at once",
                "n" if options.n > 1 else what,
            )
        sequences: list[SequenceState] = []
        for prompt in prompts:
            sampling = options.for_prompt(len(prompt), self.limits, what)
            for child in range(options.n):
                index = len(sequences)
                sequences.append(SequenceState(index, f"{answer_id}-{index}", prompt, child_sampling(sampling, child)))
        return sequences

    async def _collect(self, generation: Generation) -> list[Choice]:
        choices = [Choice() for _ in generation.sequences]
        async for piece in self._watched(generation):
            if piece is not None:
                choices[piece.index].add(piece)
        return choices

    async def _watched(self, generation: Generation) -> AsyncIterator[Piece | None]:
        """The generation's pieces, counted."""
        events = generation.events(self.config.server.keepalive_s)
        seen: set[int] = set()
        try:
            async for piece in events:
                if piece is not None and piece.num_tokens:
                    self.metrics.generated_tokens.inc(piece.num_tokens)
                    if piece.index not in seen:
                        seen.add(piece.index)
                        self.metrics.first_token_s.observe(time.monotonic() - generation.started_at)
                yield piece
        except SequenceFailed as error:
            raise ApiError(500, str(error), code="generation_failed") from None
        finally:
            await events.aclose()

    async def _events(
        self, answer: Answer, generation: Generation, options: GenerationOptions, prompt_tokens: int
    ) -> AsyncGenerator[str, None]:
        more = {"usage": None} if options.include_usage else {}
        keepalive_s = self.config.server.keepalive_s
        for state in generation.sequences:
            if first := answer.first_chunk(state.index):
                yield event(first | more)
        last_sent = time.monotonic()
        async for piece in self._watched(generation):
            now = time.monotonic()
            if piece is not None and (piece.text or piece.tokens or piece.finish_reason):
                yield event(answer.chunk(piece) | more)
            elif piece is not None and piece.processed is not None and options.return_progress:
                total = len(generation.sequences[piece.index].prompt_token_ids)
                elapsed_ms = (now - generation.started_at) * 1e3
                yield event(answer.progress_chunk(piece.index, total, piece.processed, elapsed_ms) | more)
            elif now - last_sent >= keepalive_s:
                yield KEEP_ALIVE
            else:
                continue
            last_sent = now
        if options.include_usage:
            yield event(answer.usage_chunk(make_usage(generation, prompt_tokens, answer.seed)))

    async def _end_stream(self, generation: Generation, error: BaseException | None) -> None:
        self.metrics.in_flight.dec()
        if isinstance(error, ClientGone):
            self.metrics.disconnects.inc()
        elif isinstance(error, Exception):
            self.metrics.stream_errors.inc()
        await self._end(generation)

    async def _end(self, generation: Generation) -> None:
        await generation.close()
        self._running.discard(generation)
        for state in generation.sequences:
            if state.first_token_at and state.last_token_at and state.completion_tokens > 1:
                per_token = (state.last_token_at - state.first_token_at) / (state.completion_tokens - 1)
                self.metrics.token_s.observe(per_token)
