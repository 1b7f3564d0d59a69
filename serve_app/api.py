"""The OpenAI-style HTTP API around anything with Engine's interface: `make_api(engine, config)` gives the FastAPI app."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qsa.config import EngineConfig
from qsa.errors import EngineDeadError
from qsa.serve_app.answering import STATS_TIMEOUT_S, Api, error_response, json_response
from qsa.serve_app.auth import KeyCheck
from qsa.serve_app.errors import ApiError, bad_request
from qsa.serve_app.generation import ServingEngine
from qsa.serve_app.metrics import plain
from qsa.serve_app.warm_up import WarmUp

GET = ["GET", "HEAD"]


class Guard:
    """ASGI middleware: the API key, before anything of the request is read."""

    def __init__(self, app: ASGIApp, keys: KeyCheck) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"").decode("utf-8", "surrogateescape")
            if not self._keys.allows(scope["path"], given):
                error = ApiError(
                    401, "missing or wrong API key", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_api(engine: ServingEngine, config: EngineConfig, warm_up: WarmUp | None = None) -> FastAPI:
    """The whole HTTP API of one engine. `app.state.api` is its `Api`; the caller owns the engine.

    warm_up: of an engine that is not ready yet; None: it is.
    """
    api = Api(engine, config, warm_up)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        api.close()

    app = FastAPI(title="QSA", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.api = api
    app.add_middleware(Guard, keys=KeyCheck(config.server.api_keys))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        message = {404: "there is no such path", 405: "this path does not allow the method"}.get(
            error.status_code, str(error.detail)
        )
        return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return error_response(bad_request(str(error)))

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> Response:
        return error_response(error)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await api.answer(request, is_chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await api.answer(request, is_chat=False)

    @app.api_route("/v1/models", methods=GET)
    async def models() -> Response:
        return json_response({"object": "list", "data": [api.model_card()]})

    @app.api_route("/v1/models/{name:path}", methods=GET)
    async def model(name: str) -> Response:
        if name not in api.model_names:
            return error_response(ApiError(404, f"the model {name[:100]!r} does not exist", code="model_not_found"))
        return json_response(api.model_card())

    @app.api_route("/health", methods=GET)
    async def health() -> Response:
        return await api.health(for_traffic=False)

    @app.api_route("/ready", methods=GET)
    async def ready() -> Response:
        return await api.health(for_traffic=True)

    @app.api_route("/stats", methods=GET)
    async def stats() -> Response:
        try:
            return json_response(plain(await api.stats()))
        except TimeoutError:
            return error_response(EngineDeadError(f"the engine did not answer within {STATS_TIMEOUT_S:g} s"))
        except Exception as error:
            return error_response(error)

    @app.api_route("/metrics", methods=GET)
    async def metrics() -> Response:
        return await api.metrics_response()

    return app
