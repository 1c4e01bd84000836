"""Errors of the API, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteException

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(HTTPException):
    """A request that is not answered.

    Args:
        status: HTTP status.
        message: reason, and what to do.
        param: field of the request that is meant.
        code: OpenAI's code, where there is one.
        retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers)
        self.body = error_body(status, message, param, code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Returns the body of an error."""
    kind = _TYPES.get(status, "internal_error")
    said = {"message": message, "type": kind, "param": param, "code": code}
    # JSON may name halves of surrogate pairs, which no answer can hold.
    return {
        "error": {
            name: value and value.encode(errors="replace").decode() for name, value in said.items()
        }
    }


def add_handlers(app: FastAPI) -> None:
    """Makes all errors of an app, those of FastAPI among them, OpenAI's."""

    @app.exception_handler(StarletteException)
    async def on_error(request: Request, error: StarletteException) -> JSONResponse:
        body = getattr(error, "body", None) or error_body(error.status_code, str(error.detail))
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(each) for each in first["loc"][1:]) or None
        message = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "json_invalid":
            message, where = f"the body is no JSON: {first['ctx']['error']}", None
        elif first["type"] == "extra_forbidden":
            message = f"{where} is not known here"
        elif where is not None and first["type"] != "value_error":
            message = f"{where}: {message}"
        return JSONResponse(error_body(400, message, where), 400)

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, "the server failed; its log says more"), 500)
