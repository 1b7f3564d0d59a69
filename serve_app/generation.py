"""One HTTP request on the engine: its sequences run side by side, tokens become text, stop strings end them.

`Generation.events()` yields `Piece`s of all sequences as they come, and None when nothing came for a while. Leaving it,
for whatever reason, ends the sequences that still run: through the engine's own abort.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qsa.model.detokenize import IncrementalDetokenizer, StopChecker
from qsa.scheduler.request import FinishReason, RequestOutput, SamplingParams, TokenOutput
from qsa.serve_app.api_types import finite

FIRST_WORD_S = 2.0  # how long an answer's status waits for the engine to accept or refuse
CANCEL_AGAIN_S = 0.5


class ServingEngine(Protocol):
    """The part of `qsa.actors.engine.Engine` that HTTP needs; tests bring their own."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def longest_sequence(self) -> int: ...
    @property
    def model_name(self) -> str: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...
    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        sparse_id: int | None = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]: ...
    async def abort(self, request_id: str) -> None: ...
    async def stats(self) -> Any: ...
    async def health(self) -> Any: ...


class SequenceFailed(Exception):
    """The engine ended a sequence with an error; the message is for the client."""


@dataclass(frozen=True)
class TokenPiece:
    """A token with its log-probabilities, in strict JSON's numbers, and its own bytes."""

    data: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float | None], ...] = ()
    text_offset: int = 0  # characters of the sequence's text before this token


@dataclass(frozen=True)
class Piece:
    """What one sequence said since its last piece.

    Attributes:
        index:         the sequence's number in the answer.
        text:          whole characters, stop strings already cut off.
        tokens:        log-probabilities of the tokens that the text consists of, when asked for.
        num_tokens:    tokens generated, also those without text.
        processed:     prompt tokens computed so far; set while the prompt is being computed.
        finish_reason: "stop" or "length", in the last piece.
    """

    index: int
    text: str = ""
    tokens: tuple[TokenPiece, ...] = ()
    num_tokens: int = 0
    processed: int | None = None
    finish_reason: str | None = None


@dataclass
class SequenceState:
    """A sequence's prompt and parameters, and what is known about it so far."""

    index: int
    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    completion_tokens: int = 0
    attended_share: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished: bool = False  # by the engine, or by a stop string, which the engine does not know
    ended_in_engine: bool = False


class _TextBuilder:
    """Text of one sequence: incremental decoding, stop strings, log-probabilities aligned with the text sent."""

    def __init__(self, tokenizer: Any, state: SequenceState, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, state.prompt_token_ids)
        self._checker = StopChecker(list(stop)) if stop else None
        self._wants_logprobs = state.sampling.logprobs >= 0
        self._decoded_len = 0  # characters decoded, and of these
        self._sent_len = 0  # characters handed out
        self._held: deque[TokenPiece] = deque()  # tokens whose text is not handed out yet

    def push(self, token: TokenOutput) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string ended the sequence."""
        if self._wants_logprobs:
            self._held.append(self._token_piece(token))
        return self._check(self._detokenizer.push(token.token_id))

    def flush(self) -> str:
        """What was held back, when no more tokens follow."""
        text, stopped = self._check(self._detokenizer.flush())
        if not stopped and self._checker is not None:
            rest = self._checker.flush()
            self._sent_len += len(rest)
            text += rest
        return text

    def take_tokens(self, ended: bool, stopped: bool = False) -> tuple[TokenPiece, ...]:
        """Log-probabilities that belong to the text handed out; at the end all, less those of a stop string."""
        taken = []
        while self._held:
            offset = self._held[0].text_offset
            if not (offset < self._sent_len or (offset == self._sent_len and ended and not stopped)):
                break
            taken.append(self._held.popleft())
        return tuple(taken)

    def _check(self, text: str) -> tuple[str, bool]:
        self._decoded_len += len(text)
        stopped = False
        if self._checker is not None:
            text, stopped = self._checker.push(text)
        self._sent_len += len(text)
        return text, stopped

    def _token_piece(self, token: TokenOutput) -> TokenPiece:
        top = tuple((self._tokenizer.token_bytes(i), finite(p)) for i, p in token.top_logprobs)
        return TokenPiece(self._tokenizer.token_bytes(token.token_id), finite(token.logprob), top, self._decoded_len)


class Generation:
    """All sequences of one request. State: their progress, and the tasks that read them from the engine."""

    def __init__(
        self,
        engine: ServingEngine,
        sequences: list[SequenceState],
        *,
        stop: Sequence[str] = (),
        sparse_id: int | None = None,
        priority: int = 0,
    ) -> None:
        self.sequences = sequences
        self.sparse_id = sparse_id
        self.started_at = time.monotonic()
        self._engine = engine
        self._stop = stop
        self._priority = priority
        self._queue: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def completion_tokens(self) -> int:
        return sum(state.completion_tokens for state in self.sequences)

    @property
    def attended_share(self) -> float | None:
        known = [state.attended_share for state in self.sequences if state.attended_share is not None]
        return sum(known) / len(known) if known else None

    async def start(self) -> None:
        """Submit all sequences; wait a moment for the engine to accept or refuse them.

        Raises:
            RequestError, OverloadedError, EngineDeadError: none of the sequences runs.
        """
        accepted = [asyncio.get_running_loop().create_future() for _ in self.sequences]
        self._tasks = [asyncio.create_task(self._pump(state, future)) for state, future in zip(self.sequences, accepted)]
        gathered = asyncio.gather(*accepted)
        try:
            await asyncio.wait({gathered}, timeout=FIRST_WORD_S)
            if gathered.done():
                gathered.result()
        except BaseException:
            await self.close()
            raise
        finally:
            # neither accepted nor refused yet: a stream begins, and a refusal will be its error event
            gathered.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def events(self, keepalive_s: float) -> AsyncGenerator[Piece | None, None]:
        """Pieces until every sequence has ended; None after `keepalive_s` of silence."""
        running = len(self.sequences)
        try:
            while running:
                try:
                    async with asyncio.timeout(keepalive_s):  # not wait_for, which may swallow a cancellation
                        item = await self._queue.get()
                except TimeoutError:
                    yield None
                    continue
                if isinstance(item, BaseException):
                    raise item
                running -= item.finish_reason is not None
                yield item
        finally:
            await self.close()

    def fail(self, error: Exception) -> None:
        """Let whoever reads the events see this error next."""
        self._queue.put_nowait(error)

    async def close(self) -> None:
        """End what still runs. Calling it again waits for what is left, also when a cancellation cut the first call short."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            # again after a while: below, somebody's wait_for may swallow a cancellation
            await asyncio.wait(self._tasks, timeout=CANCEL_AGAIN_S)
            self._tasks = [task for task in self._tasks if not task.done()]

    async def _pump(self, state: SequenceState, accepted: asyncio.Future[None]) -> None:
        try:
            async for piece in self._pieces(state, accepted):
                self._queue.put_nowait(piece)
        except Exception as error:
            if not accepted.done():
                accepted.set_exception(error)
            self._queue.put_nowait(error)
        finally:
            if not accepted.done():
                accepted.cancel()

    async def _pieces(self, state: SequenceState, accepted: asyncio.Future[None]) -> AsyncIterator[Piece]:
        builder = _TextBuilder(self._engine.tokenizer, state, self._stop)
        ends = {*state.sampling.stop_token_ids, *(() if state.sampling.ignore_eos else self._engine.eos_token_ids)}
        outputs = self._engine.generate(
            state.prompt_token_ids,
            state.sampling,
            sparse_id=self.sparse_id,
            priority=self._priority,
            request_id=state.request_id,
        )
        try:
            async for output in outputs:
                if not accepted.done():
                    accepted.set_result(None)
                state.ended_in_engine = output.finish_reason is not None
                yield self._read(state, builder, output, ends)
                if state.finished:
                    return
            raise SequenceFailed("the engine ended the sequence without a reason")
        finally:
            await self._leave(state, outputs)

    def _read(self, state: SequenceState, builder: _TextBuilder, output: RequestOutput, ends: set[int]) -> Piece:
        if output.finish_reason is FinishReason.ERROR:
            raise SequenceFailed(output.error or "the engine could not continue this sequence")
        if output.finish_reason is FinishReason.ABORT:
            raise SequenceFailed("the request was aborted by the server")
        if output.attended_share is not None:
            state.attended_share = output.attended_share
        if not output.tokens and output.finish_reason is None:
            return Piece(state.index, processed=output.computed_len)
        now = time.monotonic()
        state.first_token_at = state.first_token_at or now
        state.last_token_at = now
        text, stopped = "", False
        for position, token in enumerate(output.tokens):
            state.completion_tokens += 1
            is_end = output.finish_reason is FinishReason.STOP and position == len(output.tokens) - 1
            if is_end and token.token_id in ends:
                continue  # the ending token is not part of the text
            more, stopped = builder.push(token)
            text += more
            if stopped:
                break
        finish = "stop" if stopped else output.finish_reason.value if output.finish_reason else None
        if finish and not stopped:
            text += builder.flush()
        state.finished = finish is not None
        tokens = builder.take_tokens(ended=finish is not None, stopped=stopped)
        return Piece(state.index, text, tokens, len(output.tokens), None, finish)

    async def _leave(self, state: SequenceState, outputs: AsyncIterator[RequestOutput]) -> None:
        """Close the engine's iterator; a sequence that has not ended there is aborted by name."""
        if isinstance(outputs, AsyncGenerator):
            with contextlib.suppress(Exception):
                await outputs.aclose()
        if not state.ended_in_engine:
            with contextlib.suppress(Exception):
                await self._engine.abort(state.request_id)
