"""Middleware that looks at the names of hosts, the bearer token, the size of a body and the time that it takes."""

import asyncio
import base64
import binascii
import hmac
import math
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException

from specker.serve.errors import failure
from specker.serve.hosts import Hosts

ROOM = 256 << 20  # bytes of the bodies of all requests that have not ended, the first SMALL of each left out
SMALL = 64 << 10  # so that small bodies always have room
FULL = f"the server holds {ROOM >> 20} MiB of requests' bodies; try again later"
OPEN = ("/", "/health")  # ask for no token


class Limits:
    """Refuses with 401, 403, 408, 413 and 503, and then closes the connection, whose body it has not read."""

    def __init__(self, app: Any, hosts: Hosts, key: str | None, body: int, seconds: float):
        """`key`: the token; None: none is asked for. `body`: bytes. `seconds`: for the body."""
        self.app, self.hosts, self.key, self.body, self.seconds = app, hosts, key, body, seconds
        self.too_large = f"the body is larger than {body >> 20} MiB"
        self.later = {"Connection": "close", "Retry-After": str(math.ceil(seconds))}
        self.held = 0  # bytes of ROOM that are taken

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, refusal, read, held = dict(scope["headers"]), None, 0, 0
        given, length = headers.get(b"authorization", b""), headers.get(b"content-length", b"0")
        more = {"Connection": "close"}
        if foreign := self.hosts.refusal(scope["headers"]):
            refusal = 403, foreign
        elif self.key and scope["path"] not in OPEN and not self._knows(given, headers.get(b"x-api-key", b"")):
            refusal = 401, "the API key is missing or wrong"
            more["WWW-Authenticate"] = "Basic" if scope["path"].startswith("/view") else "Bearer"
        elif not length.isdigit() or int(length) > self.body:
            refusal = 413, self.too_large
        elif self.held + max(0, int(length) - SMALL) > ROOM:
            refusal, more = (503, FULL), self.later

        end: float | None = asyncio.get_running_loop().time() + self.seconds

        async def counted() -> Any:
            nonlocal read, held, end
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"the body takes more than {self.seconds:g} s", {"Connection": "close"}
                ) from None
            if not message.get("more_body"):
                end = None  # what follows is the end of the connection
            read += len(message.get("body", b""))
            if read > self.body and refusal is None:  # a body in chunks has no length
                raise HTTPException(413, self.too_large, {"Connection": "close"})
            if refusal is None:
                new = max(0, read - SMALL) - held
                if new and self.held + new > ROOM:
                    raise HTTPException(503, FULL, self.later)
                held, self.held = held + new, self.held + new
            return message

        if refusal is None:
            try:
                return await self.app(scope, counted, send)
            finally:
                self.held -= held
        with suppress(HTTPException):
            while read < 2 * self.body and (await counted()).get("more_body"):
                pass  # a client that is still sending would not read the answer
        return await failure(*refusal, more, scope["path"])(scope, receive, send)

    def _knows(self, given: bytes, key: bytes) -> bool:
        """Whether a header `authorization`, in which browsers send a password, or `x-api-key` has the token."""
        kind, _, token = given.partition(b" ")
        if kind.lower() == b"basic":
            with suppress(binascii.Error):
                token = base64.b64decode(token).partition(b":")[2]
        own = (self.key or "").encode()
        return hmac.compare_digest(token, own) | hmac.compare_digest(key, own)
