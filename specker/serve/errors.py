"""Errors in the form of the OpenAI API, each with one sentence."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException


def detail(status: int, message: str) -> dict[str, Any]:
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
    names = [str(name) for name in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return failure(400, "the body is not JSON")
    if first["type"] == "extra_forbidden":
        return failure(400, f"there is no field {names[-1]!r}")
    message = first["msg"].removeprefix("Value error, ")
    return failure(400, f"{names[0]}: {message}" if names else message)
