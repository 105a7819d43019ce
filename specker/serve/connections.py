"""The HTTP server (uvicorn): its settings, and how signals end it."""

import os
import sys
import threading
from types import FrameType
from typing import Any

import uvicorn

from specker.serve.settings import Serving

MARGIN = 10  # seconds beyond the time limit of a request, in which the server can end by itself


def config(app: Any, serving: Serving) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,  # a client must not reuse a connection just as it is closed
        timeout_graceful_shutdown=int(serving.seconds) + 1,
    )


class Server(uvicorn.Server):
    """Ends after the running requests at the first signal, and at once at the second, or when a thread hangs."""

    def __init__(self, config: uvicorn.Config, serving: Serving):
        super().__init__(config)
        self.grace = serving.seconds + MARGIN

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            _leave(sig, "specker: interrupted")
        super().handle_exit(sig, frame)
        said = f"specker: error: the server did not end within {self.grace:g} s, so it was ended"
        end = threading.Timer(self.grace, _leave, (sig, said))
        end.daemon = True
        end.start()


def _leave(sig: int, said: str) -> None:
    """End the process at once, with the code that shells give for a signal."""
    sys.stderr.write(said + "\n")
    sys.stderr.flush()
    os._exit(128 + sig)
