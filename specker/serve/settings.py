"""The server's own flags, and its limits that have none."""

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
    view: bool = opt(False, "show the rounds of the last requests at /view, read only")
    # Without a flag:
    grammar_seconds: float = 1.0  # of CPU time to compile a JSON schema or tools, which a client could make endless
    health_seconds: float = 60.0  # a round, or preparing a request, that takes longer hangs: /health says 503
    client_seconds: float = 60.0  # to send a request's head, or its body, or to read on: as long as nginx waits
    connections: int = 512  # open at once, some for each place in the queue; the next ones are closed
    body: int = 8  # MiB of a request's body, about two million tokens of text

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
        if not 0 < self.seconds <= LONGEST:
            raise ValueError(f"--seconds must be above 0 and at most {LONGEST}, got {self.seconds}")
