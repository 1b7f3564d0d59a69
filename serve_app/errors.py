"""Errors as HTTP answers: OpenAI's envelope for every failure, and which exception becomes which status."""

from __future__ import annotations

import math
from typing import Any

from qsa.errors import CapacityError, ContextLengthError, EngineDeadError, EngineRecoveringError, OverloadedError, RequestError

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
TYPES |= {405: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """An answer that is an error: status, OpenAI's four fields, and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """The answer to an exception. What nobody foresaw is a 500 that does not show its inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        code = error.code
        if code is None and isinstance(error, ContextLengthError):
            code = "context_length_exceeded"
        if code is None and isinstance(error, CapacityError):
            code = "capacity_exceeded"
        return ApiError(400, str(error), param=error.param, code=code)
    if isinstance(error, OverloadedError):
        retry_after = str(max(1, math.ceil(error.retry_after_s)))
        return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": retry_after})
    if isinstance(error, EngineRecoveringError):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "2"})
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "5"})
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def is_foreseen(error: BaseException) -> bool:
    """Whether the exception is an answer to the client; others belong in the log with their traceback."""
    return isinstance(error, (ApiError, RequestError, OverloadedError, EngineDeadError))
