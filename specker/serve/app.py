"""The endpoints: each turns what is asked into requests of the session."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from specker.answers import channels, harmony, reasoning
from specker.answers.reader import Reading, reading
from specker.answers.tool_formats import TAGS
from specker.checkpoints.tokenizer import Tokens
from specker.runtime import strategies
from specker.runtime.engine import Engine
from specker.runtime.round import state
from specker.runtime.text import TooLong, rendered, reserved
from specker.serve import infill, tools
from specker.serve.answers import ChatAnswer, TextAnswer
from specker.serve.api import Asked, Chat, Completion, Tokenize
from specker.serve.checker import Checker, Unavailable
from specker.serve.encoder import Encoder
from specker.serve.errors import failure, handlers
from specker.serve.hosts import Hosts
from specker.serve.limits import Limits
from specker.serve.messages import Conversation, MessagesAnswer, MessagesRequest
from specker.serve.pieces import Pieces
from specker.serve.responses import ResponseAnswer, ResponseRequest
from specker.serve.settings import Serving
from specker.serve.worker import Busy, Call, Failed, Worker
from specker.view.live import Live
from specker.view.page import LIVE_POLICY, UNFRAMED

log = logging.getLogger(__name__)

T = TypeVar("T")
Texts = dict[state.Request, str]  # the requests of a call, and their prompts for the live page
Prepared = tuple[Texts, Reading]

SAVE = 300.0  # seconds between two writes of the texts that lookup keeps
PACE = 0.05  # CPU seconds a token that a text may spend in its grammar, which others wait for


class Server:
    def __init__(self, engine: Engine, serving: Serving, sampling: dict[str, float]):
        """`sampling`: of requests that do not say; it goes before `engine.usual_sampling`."""
        self.engine = engine
        self.key = serving.api_key
        self.salt = "" if self.key else None  # of requests without one: those with a key trust one another
        self.name = serving.name or Path(engine.models.split(" + ")[0]).name
        engine.target_name = engine.session.name = self.name  # errors name the model, never a path
        self.sampling = {**engine.usual_sampling, **sampling}
        self.worker = Worker(engine.session, serving.queue, serving.seconds, self._ended)
        self.copying = strategies.copier(engine.drafters)
        if self.copying is not None and self.copying.file is not None and self.salt is None:
            log.warning("--lookup-file keeps only texts of requests with a cache_salt, since there is no API key")
        self.live = Live(engine, self.worker.metrics.queue) if serving.view else None
        # One thread: each that has built a page keeps the memory of the largest one.
        self.viewer = ThreadPoolExecutor(1, "specker-view")
        engine.trace = self.live.round if self.live else None
        grammars = engine.session.grammars
        self.checker = grammars.check = Checker(grammars.tokenizer, grammars.limits, serving.grammar_seconds)
        grammars.pace = PACE
        self.encoder = Encoder(engine.target, self.name)
        self.health_seconds = serving.health_seconds
        self._numbers, self._reserved = count(), reserved(engine.tokenizer)
        special, tags = engine.target.tokens.special, {*TAGS, reasoning.OPEN, reasoning.CLOSE}
        self.special = {tag: token for tag, token in special.items() if tag in tags}
        self.harmony = harmony.of(special)
        self.infill = infill.Infill.of(engine.target.tokens)

    @asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        self.worker.start()
        ends = asyncio.Event()
        saving = asyncio.create_task(self._save_now_and_then(ends))
        yield
        ends.set()
        await saving  # not cancelled: what it has begun to write must be older than the last texts
        await asyncio.to_thread(self.worker.stop)
        if self.copying is not None:
            await self._save(self.copying.writer())
        self.viewer.shutdown(wait=False, cancel_futures=True)
        self.encoder.close()
        self.checker.close()

    async def _save_now_and_then(self, ends: asyncio.Event) -> None:
        """Write the texts that lookup keeps, so that a server that is killed loses few."""
        while self.copying is not None and self.copying.file is not None and not ends.is_set():
            try:
                await asyncio.wait_for(ends.wait(), SAVE)
            except TimeoutError:
                await self._save(await asyncio.wrap_future(self.worker.between_steps(self.copying.writer)))

    async def _save(self, write: Callable[[], None] | None) -> None:
        if write is None:
            return
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            log.error("the texts of --lookup-file cannot be written: %s", error.strerror)

    def ill(self) -> str | None:
        """Why the server is not healthy; None if it is."""
        if not (self.worker.is_alive() and self.worker.sound):
            return "the last round failed"
        oldest = {"a round": self.worker.step_seconds(), "preparing a request": self.encoder.oldest()}
        slow = [what for what, seconds in oldest.items() if seconds > self.health_seconds]
        return f"{slow[0]} takes more than {self.health_seconds:g} s" if slow else None

    @property
    def template(self) -> str:
        """The chat template."""
        return str(getattr(self.engine.tokenizer, "chat_template", None))

    async def count(self, asked: Chat) -> int:
        """The tokens of a chat's prompt. Raises ValueError."""
        prompt = await self.encoder.run(self._rendered, asked)
        return len(await self.encoder.encode(prompt, special=False))

    async def chat(self, asked: Chat) -> Prepared:
        """Raises ValueError."""
        prompt, last = await self.encoder.run(self._rendered, asked), asked.messages[-1].content or ""
        continued = last if asked.continue_final_message else ""
        special = self.engine.target.tokens.special
        read = reading(special, self.template, prompt, continued, tools.functions_of(asked))
        form = await self._grammar(asked, read.inside, read.begun)
        ids = await self.encoder.encode(prompt, special=False)
        logprobs = max(1, asked.top_logprobs or 0) if asked.logprobs else 0
        return await self._requests(asked, [(ids, last)], logprobs, form), read

    async def completion(self, asked: Completion) -> Prepared:
        """Raises ValueError."""
        form = await self._grammar(asked)
        if asked.suffix and self.infill is None:
            raise ValueError(f"suffix is not supported: the model has no tokens for it, such as {infill.MARKS[0][0]}")
        asked = self.infill.prompted(asked) if asked.suffix and self.infill else asked
        prompts = [(await self.encoder.encode(p), p) if isinstance(p, str) else (p, "") for p in asked.prompts]
        logprobs = 0 if asked.logprobs is None else max(1, asked.logprobs)
        return await self._requests(asked, prompts, logprobs, form), Reading()

    def _rendered(self, asked: Chat) -> str:
        if taken := self._reserved & {*asked.chat_template_kwargs}:
            raise ValueError(f"chat_template_kwargs cannot set {min(taken)}")
        for name, neutral in (("reasoning_effort", None), ("verbosity", "medium")):
            if (value := getattr(asked, name)) is not None and name in self.template:
                asked.chat_template_kwargs.setdefault(name, value)
            elif value not in (None, neutral):
                raise ValueError(f"the model's chat template knows no {name}")
        how: dict[str, Any] = {"continue_final_message": asked.continue_final_message}
        how["add_generation_prompt"] = asked.add_generation_prompt
        if asked.tools:
            how["tools"] = [tool.model_dump(exclude_none=True) for tool in asked.tools]
            if self.harmony is not None:  # its templates add to the description, without asking whether there is one
                for tool in how["tools"]:
                    tool["function"].setdefault("description", "")
        messages = [message.plain() for message in asked.messages]
        return rendered(self.engine.target, self.name, messages, **how, **asked.chat_template_kwargs)

    async def _grammar(self, asked: Asked, inside: bool | None = None, begun: str = "") -> str | None:
        """What the text must match, compiled; None if it is free. `inside`, `begun`: as in `Reading`."""
        form = await self.encoder.run(self._form, asked, inside, begun)
        session = self.engine.session
        if form is not None and not session.grammars.knows(form):
            await self.encoder.run(session.guide, form, use="grammar")
        return form

    def _form(self, asked: Asked, inside: bool | None, begun: str) -> str | None:
        form = asked.response_format.grammar() if asked.response_format is not None else None
        if isinstance(asked, Chat) and self.harmony is not None:
            form = channels.schema_of(self.harmony, begun, form) if form else None
            if functions := tools.functions_of(asked):
                form = channels.calls_of(self.harmony, begun, functions, not tools.may_call(asked))
        elif isinstance(asked, Chat):
            form = form or tools.grammar_of(asked, self.template, self.special)
            if form is not None and inside and not tools.may_call(asked):
                form = reasoning.preceded(form, self.special)
        return form

    async def _requests(
        self, asked: Asked, prompts: list[tuple[list[int], str]], logprobs: int, form: str | None
    ) -> Texts:
        """`prompts`: ids, and a text for the live page. `form`: the grammar."""
        prediction = await self.encoder.encode(asked.prediction or "", special=False, what="prediction")

        def made() -> Texts:
            return {
                self.engine.session.request(ids, params, index=next(self._numbers)): text
                for ids, text in prompts
                for params in asked.params(
                    self.sampling, self.engine.max_context - len(ids), logprobs, form, self.salt, prediction
                )
            }

        return await self.encoder.run(made)

    def _ended(self, request: state.Request) -> None:
        if self.live:
            self.live.end(request)

    async def tokens(self, asked: Tokenize) -> dict[str, Any]:
        """Raises ValueError."""
        if (asked.prompt is None) == (asked.messages is None):
            raise ValueError("give one of prompt and messages")
        text = asked.prompt
        if text is None:
            messages = [message.plain() for message in asked.messages or ()]
            text = await self.encoder.run(rendered, self.engine.target, self.name, messages)
        ids = await self.encoder.encode(text, special=asked.prompt is not None)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.engine.max_context}

    def check_name(self, name: str | None) -> None:
        """Raises HTTPException if the request names another model than the one that is served."""
        if name not in (None, self.name):
            raise HTTPException(404, f"the model {name[:60]!r} is not served here, but {self.name!r} is")

    async def within(self, texts: int, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, which prepares a call with so many texts. Raises HTTPException if there is none; the
        places that it takes in the queue are then given back."""
        done = False
        try:
            self.worker.reserve(texts)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except Busy as error:
            raise HTTPException(429, str(error), {"Retry-After": str(error.seconds)}) from None
        try:
            async with asyncio.timeout(self.worker.limit):
                result = await work()
            done = True
            return result
        except ValueError as error:
            raise HTTPException(413 if isinstance(error, TooLong) else 400, _said(error)) from None
        except Unavailable as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from None
        except TimeoutError:
            raise HTTPException(504, self.worker.late) from None
        finally:
            if not done:
                self.worker.release(texts)

    async def answer(
        self,
        asked: Any,
        http: Request,
        prepare: Callable[[Any], Awaitable[Prepared]],
        kind: Callable[[Call, Reading, Any, str, Tokens], Pieces],
    ) -> Response:
        began = time.monotonic()
        self.check_name(asked.model)
        texts, reading = await self.within(asked.texts, partial(prepare, asked))
        if self.live:
            for request, text in texts.items():
                self.live.begin(request, f"request {request.index}", text)
        call = self.worker.call([*texts], began)
        answer = kind(call, reading, asked, self.name, self.engine.target.tokens)
        if asked.stream:
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        whole, left = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(_left(http))
        try:
            await asyncio.wait({whole, left}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(whole.result()) if whole.done() else Response(status_code=499)
        except (Failed, TimeoutError) as error:
            raise HTTPException(*call.why(error)) from None
        finally:
            whole.cancel()
            left.cancel()
            answer.close()


async def _left(http: Request) -> None:
    """Return once the client has gone away."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _said(error: Exception) -> str:
    """An error of the runtime with the API's names."""
    said = str(error).replace("max_new_tokens", "max_tokens").replace(", which chat needs", "")
    said = said.replace("policy must be one of ", "policy must be one of off, ")
    return re.sub(r"\bpolicy(?==| must)", "speculation", said).replace("stop_ids", "stop_token_ids")


def application(engine: Engine, serving: Serving, sampling: dict[str, float]) -> FastAPI:
    server, began = Server(engine, serving, sampling), int(time.time())
    off: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}  # the pages load scripts from afar
    app = FastAPI(title="specker", lifespan=server.running, exception_handlers=handlers(), **off)
    app.state.server = server
    limits: dict[str, Any] = {"key": server.key, "body": serving.body << 20, "seconds": serving.client_seconds}
    app.add_middleware(Limits, hosts=Hosts(serving), **limits)
    if serving.allow_origin:
        app.add_middleware(CORSMiddleware, allow_origins=serving.allow_origin, allow_methods=["*"], allow_headers=["*"])

    @app.post("/v1/chat/completions")
    async def chat(asked: Chat, http: Request) -> Response:
        return await server.answer(asked, http, server.chat, ChatAnswer)

    @app.post("/v1/completions")
    async def completions(asked: Completion, http: Request) -> Response:
        return await server.answer(asked, http, server.completion, TextAnswer)

    @app.post("/v1/responses")
    async def responses(asked: ResponseRequest, http: Request) -> Response:
        return await server.answer(asked.chat, http, server.chat, partial(ResponseAnswer, asked))

    @app.post("/v1/messages")
    async def messages(asked: MessagesRequest, http: Request) -> Response:
        return await server.answer(asked.chat, http, server.chat, MessagesAnswer)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(asked: Conversation) -> Response:
        server.check_name(asked.model)
        count = await server.within(1, partial(server.count, asked.chat))
        server.worker.release(1)
        return JSONResponse({"input_tokens": count})

    @app.post("/tokenize")
    async def tokenize(asked: Tokenize) -> Response:
        server.check_name(asked.model)
        found = await server.within(1, partial(server.tokens, asked))
        server.worker.release(1)
        return JSONResponse(found)

    about = {"id": server.name, "object": "model", "created": began, "owned_by": "specker"}
    about["max_model_len"] = engine.max_context

    @app.get("/")
    async def root() -> dict[str, Any]:
        paths = {"api": "/v1", "models": "/v1/models", "health": "/health", "metrics": "/metrics"}
        return {"server": "specker", **paths, "view": "/view" if server.live else None}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{name:path}")  # names may have slashes
    async def model(name: str) -> dict[str, Any]:
        server.check_name(name)
        return about

    @app.get("/health")
    async def health() -> Response:
        ill = server.ill()
        drafting = server.worker.drafting() if engine.speculates else f"no, because {engine.strategy} drafts nothing"
        return JSONResponse({"status": "ok", "drafting": drafting}) if ill is None else failure(503, ill)

    @app.get("/metrics")
    async def metrics() -> Response:
        future = server.worker.between_steps(server.worker.metrics.text)
        try:
            text = await asyncio.wait_for(asyncio.wrap_future(future), server.health_seconds)
        except TimeoutError:
            return failure(503, f"a round takes more than {server.health_seconds:g} s")
        return Response(text, media_type="text/plain; version=0.0.4")

    if (live := server.live) is not None:

        @app.get("/view")
        async def view() -> Response:
            page = await asyncio.get_running_loop().run_in_executor(server.viewer, live.html)
            return HTMLResponse(page, headers={"Content-Security-Policy": f"{LIVE_POLICY}; {UNFRAMED}"})

        @app.get("/view/data")
        async def data() -> Response:
            shown = await asyncio.get_running_loop().run_in_executor(server.viewer, live.data)
            return Response(shown, media_type="application/json")

    for route in app.routes:
        if isinstance(route, Route) and "GET" in (methods := route.methods or set()):
            methods.add("HEAD")  # as of any web server; starlette's own routes have it
    return app
