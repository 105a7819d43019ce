"""The server's own flags."""

import os
import re
from dataclasses import dataclass

from specker.fields import check_fields, flag, opt

API_KEY = "SPECKER_API_KEY"  # the environment's variable
LONGEST = 1_000_000  # seconds; clocks of the event loop and of select take no infinity


@dataclass(frozen=True)
class Serving:
    """Where to listen, and the server's limits."""

    host: str = opt("127.0.0.1", "address to listen on; 0.0.0.0 for every network")
    port: int = opt(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    name: str | None = opt(None, "the model's name in the API (default: the target's own)", "NAME")
    api_key: str | None = opt(None, "ask for this bearer token (default: $SPECKER_API_KEY, or none)", "KEY")
    allow_host: tuple[str, ...] = opt((), "further names under which clients reach the server", "NAME")
    allow_origin: tuple[str, ...] = opt((), "let pages of these origins call the API (CORS)", "ORIGIN")
    queue: int = opt(64, "requests that may wait; the next ones are refused (429)", least=0)
    seconds: float = opt(600.0, "time limit of a request, in seconds, its wait included")
    grammar_seconds: float = opt(1.0, "CPU seconds that compiling a JSON schema or tools may take")
    health_seconds: float = opt(60.0, "/health says 503 while a round, or preparing a request, takes longer")
    client_seconds: float = opt(60.0, "time for a client to send a request's head, or its body, or to read on")
    connections: int = opt(512, "connections that may be open; the next ones are closed", least=1)
    body: int = opt(8, "size limit of a request's body, in MiB", least=1)
    view: bool = opt(False, "show the rounds of the last requests at /view, read only")

    def __post_init__(self) -> None:
        if self.api_key is None:
            object.__setattr__(self, "api_key", os.environ.get(API_KEY))
            if self.api_key == "":
                raise ValueError(f"${API_KEY} must not be empty: set a key, or unset it")
        check_fields(self)
        for name in ("host", "api_key"):  # such as an unset variable's: every network, and no key
            if getattr(self, name) == "":
                raise ValueError(f"{flag(name)} must not be empty")
        for host in self.allow_host:
            if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", host):
                raise ValueError(f"--allow-host takes names without a port, such as gpu.lan, got {host!r}")
        for name in ("seconds", "grammar_seconds", "health_seconds", "client_seconds"):
            if not 0 < getattr(self, name) <= LONGEST:
                raise ValueError(f"{flag(name)} must be above 0 and at most {LONGEST}, got {getattr(self, name)}")
