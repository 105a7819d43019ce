"""The endpoints: each turns what is asked into requests of the session."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from specker.runtime.engine import Engine
from specker.runtime.round import state
from specker.runtime.text import TooLong, reserved
from specker.serve import tools
from specker.serve.answers import Answer, ChatAnswer, TextAnswer
from specker.serve.api import Asked, Chat, Completion, Tokenize
from specker.serve.checker import Checker
from specker.serve.errors import failure, handlers
from specker.serve.limits import Limits
from specker.serve.settings import Serving
from specker.serve.worker import Busy, Failed, Worker
from specker.view.live import Live
from specker.view.page import LIVE_POLICY

PACE = 0.05  # CPU seconds a token that a text may spend in its grammar, which others wait for


class Server:
    def __init__(self, engine: Engine, serving: Serving, sampling: dict[str, float]):
        """`sampling`: of requests that do not say, beyond what the checkpoint recommends."""
        self.engine = engine
        self.name = serving.name or Path(engine.models.split(" + ")[0]).name
        engine.target_name = engine.session.name = self.name  # errors name the model, never a path
        self.sampling = {**engine.target.recommended, **sampling}
        self.worker = Worker(engine.session, serving.queue, serving.seconds, self._ended)
        self.live = Live(engine, self.worker.metrics.queue) if serving.view else None
        engine.trace = self.live.round if self.live else None
        self._numbers, self._reserved = count(), reserved(engine.tokenizer)
        grammars = engine.session.grammars
        self.checker = grammars.check = Checker(grammars.tokenizer, grammars.limits, serving.grammar_seconds)
        grammars.pace = PACE
        self._compiler = ThreadPoolExecutor(1, "specker-grammar")
        self._encoder = ThreadPoolExecutor(1, "specker-encode")  # a tokenizer is not for several threads at once

    @asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        self.worker.start()
        yield
        await asyncio.to_thread(self.worker.stop)
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self.checker.close()

    async def encoded(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of `work`, computed beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work, *args)

    async def grammar(self, asked: Asked) -> str | None:
        """What the text must match, compiled; None if it is free. Other requests do not wait. Raises ValueError."""
        if asked.response_format is None and getattr(asked, "tools", None) is None:
            return None
        form = await self.encoded(self._grammar, asked)
        session = self.engine.session
        if form is not None and not session.grammars.knows(form):
            await asyncio.get_running_loop().run_in_executor(self._compiler, session.guide, form)
        return form

    def _grammar(self, asked: Asked) -> str | None:
        if asked.response_format is not None and (form := asked.response_format.grammar()) is not None:
            return form
        return (
            tools.grammar_of(asked, str(getattr(self.engine.tokenizer, "chat_template", None)))
            if isinstance(asked, Chat)
            else None
        )

    def chat(self, asked: Chat, form: str | None) -> list[state.Request]:
        """`form`: the grammar. Raises ValueError."""
        if taken := self._reserved & {*asked.chat_template_kwargs}:
            raise ValueError(f"chat_template_kwargs cannot set {min(taken)}")
        named = {"tools": [tool.model_dump(exclude_none=True) for tool in asked.tools]} if asked.tools else {}
        messages = [message.plain() for message in asked.messages]
        ids = self.engine.encode_chat(messages, **named, **asked.chat_template_kwargs)
        said = messages[-1]["content"]
        return self._requests(asked, [(ids, said)], max(1, asked.top_logprobs or 0) if asked.logprobs else 0, form)

    def completion(self, asked: Completion, form: str | None) -> list[state.Request]:
        """`form`: the grammar. Raises ValueError."""
        prompts = [(self.engine.encode(p), p) if isinstance(p, str) else (p, "") for p in asked.prompts]
        return self._requests(asked, prompts, 0 if asked.logprobs is None else max(1, asked.logprobs), form)

    def _requests(
        self, asked: Asked, prompts: list[tuple[list[int], str]], logprobs: int, form: str | None
    ) -> list[state.Request]:
        """`prompts`: ids, and a text for the live page."""
        texts = {
            self.engine.session.request(ids, params, index=next(self._numbers)): text
            for ids, text in prompts
            for params in asked.params(self.sampling, self.engine.max_context - len(ids), logprobs, form)
        }
        if self.live:
            for request, text in texts.items():
                self.live.begin(request, f"request {request.index}", text)
        return [*texts]

    def _ended(self, request: state.Request) -> None:
        if self.live:
            self.live.end(request)

    def tokens(self, asked: Tokenize) -> dict[str, Any]:
        """Raises ValueError."""
        if (asked.prompt is None) == (asked.messages is None):
            raise ValueError("give one of prompt and messages")
        encode, encode_chat = self.engine.encode, self.engine.encode_chat
        ids = (
            encode(asked.prompt) if asked.prompt is not None else encode_chat([m.plain() for m in asked.messages or ()])
        )
        return {"tokens": ids, "count": len(ids), "max_model_len": self.engine.max_context}

    async def answer(
        self, asked: Any, http: Request, make: Callable[..., list[state.Request]], kind: type[Answer]
    ) -> Response:
        if asked.model not in (None, self.name):
            return failure(404, f"the model {asked.model!r} is not served here, but {self.name!r} is")
        requests: list[state.Request] = []
        try:
            requests = await self.encoded(make, asked, await self.grammar(asked))
            call = self.worker.call(requests)
        except ValueError as error:
            return failure(413 if isinstance(error, TooLong) else 400, _said(error))
        except Busy as error:
            for request in requests:
                request.finished = "refused"
                self._ended(request)
            return failure(429, str(error), {"Retry-After": str(error.seconds)})
        answer = kind(call, asked, self.name, self.engine.tokenizer)
        if asked.stream:
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        whole, left = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(_left(http))
        try:
            await asyncio.wait({whole, left}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(whole.result()) if whole.done() else Response(status_code=499)
        except (Failed, TimeoutError) as error:
            return failure(*call.why(error))
        finally:
            whole.cancel()
            left.cancel()
            call.close()


async def _left(http: Request) -> None:
    """Return once the client has gone away."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _said(error: Exception) -> str:
    """An error of the runtime with the API's names."""
    return str(error).replace("max_new_tokens", "max_tokens").replace(", which chat needs", "")


def application(engine: Engine, serving: Serving, sampling: dict[str, float]) -> FastAPI:
    server, began = Server(engine, serving, sampling), int(time.time())
    off: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}  # the pages load scripts from afar
    app = FastAPI(title="specker", lifespan=server.running, exception_handlers=handlers(), **off)
    app.state.server = server
    app.add_middleware(Limits, key=serving.api_key or os.environ.get("SPECKER_API_KEY"), body=serving.body << 20)
    if serving.allow_origin:
        app.add_middleware(CORSMiddleware, allow_origins=serving.allow_origin, allow_methods=["*"], allow_headers=["*"])

    @app.post("/v1/chat/completions")
    async def chat(asked: Chat, http: Request) -> Response:
        return await server.answer(asked, http, server.chat, ChatAnswer)

    @app.post("/v1/completions")
    async def completions(asked: Completion, http: Request) -> Response:
        return await server.answer(asked, http, server.completion, TextAnswer)

    @app.post("/tokenize")
    async def tokenize(asked: Tokenize) -> Response:
        try:
            return JSONResponse(await server.encoded(server.tokens, asked))
        except ValueError as error:
            return failure(400, _said(error))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        about = {"id": server.name, "object": "model", "created": began, "owned_by": "specker"}
        return {"object": "list", "data": [about | {"max_model_len": engine.max_context}]}

    @app.get("/health")
    async def health() -> Response:
        sound = server.worker.is_alive() and server.worker.sound
        return JSONResponse({"status": "ok"}) if sound else failure(503, "the last round failed")

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.wrap_future(server.worker.between_steps(server.worker.metrics.text))
        return Response(text, media_type="text/plain; version=0.0.4")

    if (live := server.live) is not None:

        @app.get("/view")
        async def view() -> Response:
            return HTMLResponse(await asyncio.to_thread(live.html), headers={"Content-Security-Policy": LIVE_POLICY})

        @app.get("/view/data")
        async def data() -> Response:
            return Response(await asyncio.to_thread(live.data), media_type="application/json")

    return app
