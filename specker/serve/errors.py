"""Errors in the form of the endpoint's API, each with one sentence."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from specker.serve.api import place

UNREADABLE = "the body is not JSON in UTF-8, or has a number of too many digits or is nested too deeply"
JARGON = re.compile(
    r" or object to extract fields from| after validation, not \d+|, (unable to|got a) .*"
)  # pydantic's
LENGTH = 300  # characters of a message, which may show a part of what was sent
SHOWN = 60  # of a path
TYPES = "str", "Choice"  # of fields that may have several
KINDS = {  # of Anthropic's errors
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def detail(status: int, message: str) -> dict[str, Any]:
    message = message if len(message) <= LENGTH else f"{message[:LENGTH]} ..."
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": None, "code": status}


def failure(status: int, message: str, headers: Mapping[str, str] | None = None, path: str = "") -> JSONResponse:
    """`path`: of the request, because /v1/messages has a form of its own."""
    body: dict[str, Any] = {"error": detail(status, message)}
    if path.startswith("/v1/messages"):
        body = {"type": "error", "error": {"type": KINDS.get(status, "api_error"), "message": body["error"]["message"]}}
    return JSONResponse(body, status, dict(headers or {}))


def handlers() -> dict[Any, Any]:
    """Exception handlers of the application."""

    def refused(request: Request, error: HTTPException) -> Response:
        said = str(error.detail)
        if isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI's, about the body
            said = UNREADABLE
        elif said == HTTPStatus(error.status_code).phrase:  # starlette's
            said = f"{said}: {request.method} {request.url.path[:SHOWN]}"
        return failure(error.status_code, said, error.headers, request.url.path)

    def invalid(request: Request, error: RequestValidationError) -> Response:
        for each in error.errors():
            _forget_frames(each.get("ctx", {}).get("error"))
        first = error.errors()[0]
        said = sentence(first, inside=1)
        if isinstance(first["input"], bytes):  # which FastAPI did not take for JSON
            said = "the header Content-Type must be application/json"
        return failure(400, said, path=request.url.path)

    def broken(request: Request, _: Exception) -> Response:
        return failure(500, "internal error; the server's log says why", path=request.url.path)

    return {RequestValidationError: invalid, HTTPException: refused, Exception: broken}


def _forget_frames(error: Any) -> None:
    """Drop the traceback of what a validator raised: its frames hold the parsed body and the errors, this one included,
    so that only the garbage collector would free them, many requests later."""
    while isinstance(error, BaseException):
        error.__traceback__, error = None, error.__context__


def sentence(error: Mapping[str, Any], inside: int = 0) -> str:
    """A sentence about the first field that is wrong. `error`: as pydantic describes it. `inside`: how many of its
    first places are not the body's."""
    names = [name for name in error["loc"][inside:] if isinstance(name, int) or _is_field(name)]
    if error["type"] == "json_invalid":
        return "the body is not JSON"
    if error["type"] == "model_attributes_type" and not names:
        return "the body must be a JSON object"
    if error["type"] == "missing" and not names:
        return "the body is missing: a JSON object"
    if error["type"] == "int_parsing_size":
        return f"{place(names)}: Input should be a valid integer"
    if error["type"] == "extra_forbidden":
        return f"there is no field {error['loc'][-1]!r}"
    message = JARGON.sub("", error["msg"].removeprefix("Value error, "))
    return f"{place(names)}: {message}" if names else message


def _is_field(name: str) -> bool:
    """Whether it names a field, and none of the types that a field may have, as in `stop.list[str].0`."""
    return name.isidentifier() and name not in TYPES
