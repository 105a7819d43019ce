"""Errors in the form of the OpenAI API, each with one sentence."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from specker.serve.api import place

LENGTH = 300  # characters of a message, which may show a part of what was sent


def detail(status: int, message: str) -> dict[str, Any]:
    message = message if len(message) <= LENGTH else f"{message[:LENGTH]} ..."
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": None, "code": status}


def failure(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": detail(status, message)}, status, dict(headers or {}))


def handlers() -> dict[Any, Any]:
    """Exception handlers of the application."""
    return {
        RequestValidationError: _invalid,
        HTTPException: lambda _, error: failure(error.status_code, str(error.detail), error.headers),
        Exception: lambda *_: failure(500, "internal error; the server's log says why"),
    }


def _invalid(_: Request, error: RequestValidationError) -> Response:
    """A sentence about the first field that is wrong."""
    first = error.errors()[0]
    names = [name for name in first["loc"][1:] if isinstance(name, int) or _is_field(name)]
    if first["type"] == "json_invalid":
        return failure(400, "the body is not JSON")
    if first["type"] == "extra_forbidden":
        return failure(400, f"there is no field {names[-1]!r}")
    message = first["msg"].removeprefix("Value error, ")
    return failure(400, f"{place(names)}: {message}" if names else message)


def _is_field(name: str) -> bool:
    """Whether it names a field, and none of the types that a field may have, as in `stop.list[str].0`."""
    return name.isidentifier() and name not in ("str", "Choice")
