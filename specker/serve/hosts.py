"""Which names a request may give for this server, and of which pages' origins it may come.

Without this a page of any website reads a server of this machine that asks for no key: its domain's address becomes
127.0.0.1 (DNS rebinding), and then the browser takes the server for the page's own.
"""

import re
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from specker.serve.settings import Serving

HOST = re.compile(r"(\[[^\[\]]*\]|[^\[\]:@/]+)(?::\d*)?")  # a name or an address, and perhaps a port
ORIGIN = re.compile(r"[a-z][a-z\d+.-]*://(.+)")
SHOWN = 60  # characters of a name in a message


class Hosts:
    """Names are looked at on an address that only this machine reaches, where there is no API key, and with
    --allow-host everywhere."""

    def __init__(self, serving: Serving):
        self.looks = bool(serving.allow_host) or (serving.api_key is None and is_local(serving.host))
        self.names = {_plain(name) for name in (serving.host, *serving.allow_host)}
        self.origins = {origin.lower() for origin in serving.allow_origin}

    def refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Why a request with these headers is refused; None if it is not."""
        for name, value in headers if self.looks else ():
            text = value.decode("latin-1").lower()
            if name == b"host" and not self._knows(text):
                return f"the Host {text[:SHOWN]!r} is not allowed: start the server with --allow-host to add it"
            if name == b"origin" and not self._may_come_from(text):
                return f"the Origin {text[:SHOWN]!r} is not allowed: start the server with --allow-origin to add it"
        return None

    def _may_come_from(self, origin: str) -> bool:
        """`null`, which any page can make its origin, has no host."""
        if "*" in self.origins or origin in self.origins:
            return True
        found = ORIGIN.fullmatch(origin)
        return found is not None and self._knows(found[1])

    def _knows(self, host: str) -> bool:
        found = HOST.fullmatch(host)
        if found is None:
            return False
        name = _plain(found[1])
        return name in self.names or name == "localhost" or name.endswith(".localhost") or _is_loopback(name)


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`. A name without an address does not matter: no
    server can listen there."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return True
    return all(_is_loopback(str(address[0])) for *_, address in found)


def _plain(name: str) -> str:
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
