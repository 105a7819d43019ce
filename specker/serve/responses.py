"""`POST /v1/responses`: OpenAI's Responses as a chat. The server keeps no responses, so each request brings the whole
conversation."""

import time
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from specker.answers.reader import Reading
from specker.checkpoints.tokenizer import Tokens
from specker.serve.api import Asked, Chat, Items, Named, Strict
from specker.serve.blocks import Block, BlockAnswer, Step, Translated, joined
from specker.serve.worker import Call

PARTS = "input_text", "output_text", "reasoning_text", "text"
KEPT = "previous_response_id", "conversation"


class Item(BaseModel):
    """A part of the conversation: a message, or what an answer or its tools have added."""

    model_config = ConfigDict(extra="allow")  # id, status
    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None

    @field_validator("content", "output", mode="before")
    @classmethod
    def _joined(cls, given: Any) -> Any:
        return joined(given, PARTS)

    @model_validator(mode="after")
    def _whole(self) -> "Item":
        needs = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments")}
        needs |= {"function_call_output": ("call_id", "output")}
        for name in needs.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"a {self.type} needs {name}")
        return self


class Tool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Choice(Named):
    type: Literal["function"]


class Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    def of_chat(self) -> dict[str, Any]:
        """As `response_format`."""
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("text.format json_schema needs schema")
        return {"type": self.type} | ({"json_schema": {"schema": self.schema_}} if self.schema_ is not None else {})


class Text(Strict):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseRequest(Translated):
    ignored: ClassVar = {*Asked.ignored, *KEPT, "stream_options", "prompt_cache_retention"}
    neutral: ClassVar = {
        "background": (False,),
        "include": ([],),
        "max_tool_calls": (),
        "prompt": (),
        "reasoning": ({},),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    names: ClassVar = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
    model: str | None = None
    input: Items[Item]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    text: Text | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_kept(cls, given: Any) -> Any:
        if isinstance(given, dict) and (kept := [name for name in KEPT if given.get(name) is not None]):
            raise ValueError(
                f"{kept[0]} is not supported: no response is kept, so give the whole conversation as input"
            )
        return given

    @field_validator("input", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    def of_chat(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": t.model_dump(exclude={"type"})} for t in self.tools or ()]
        choice: Any = self.tool_choice
        if isinstance(choice, Choice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "tools": tools or None,
            "tool_choice": choice,
            "response_format": self.text.format.of_chat() if self.text and self.text.format else None,
            "verbosity": self.text.verbosity if self.text else None,
        }

    def _messages(self) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if self.instructions:
            made.append({"role": "system", "content": self.instructions})
        for item in self.input:
            _add(made, item)
        return made


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    """Add an item. A turn's reasoning, text and calls are items here, and one message of a chat."""
    if item.type == "function_call_output":
        return messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
    role = {"developer": "system"}.get(item.role or "", item.role) if item.type == "message" else "assistant"
    last = messages[-1] if messages else {}
    if role == "system" and last.get("role") == "system":
        last["content"] += "\n\n" + (item.content or "")  # many templates know only one
        return None
    begun = role == "assistant" and last.get("role") == "assistant" and "tool_calls" not in last
    if item.type == "reasoning":
        messages.append({"role": role, "reasoning_content": (item.content or "")})
    elif item.type == "message":
        if not begun or "content" in last:
            messages.append(last := {"role": role})
        last["content"] = item.content or ""
    else:
        if last.get("role") != "assistant":
            messages.append(last := {"role": role})
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    return None


class ResponseAnswer(BlockAnswer):
    kind = "resp_"

    def __init__(self, given: ResponseRequest, call: Call, reading: Reading, asked: Chat, name: str, tokens: Tokens):
        super().__init__(call, reading, asked, name, tokens)
        self.given, self.created, self._sent = given, int(time.time()), 0

    def begin(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def step(self, step: Step) -> Iterator[dict[str, Any]]:
        block, item = step.block, _item(step.block, "completed" if step.what == "end" else "in_progress")
        where: dict[str, Any] = {"item_id": item["id"], "output_index": step.number}
        kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]
        more: dict[str, Any] = {} if block.kind == "call" else {"content_index": 0}
        if block.kind == "text":
            more["logprobs"] = []
        part = where | {"content_index": 0, "part": _part(block)}
        if step.what == "begin":
            yield self._event("response.output_item.added", output_index=step.number, item=item)
            if block.kind != "call":
                yield self._event("response.content_part.added", **part)
        elif step.what == "more":
            yield self._event(f"response.{kind}.delta", delta=step.new, **where, **more)
        else:
            whole = {"arguments": block.text, "name": item["name"]} if block.kind == "call" else {"text": block.text}
            yield self._event(f"response.{kind}.done", **whole, **where, **more)
            if block.kind != "call":
                yield self._event("response.content_part.done", **part)
            yield self._event("response.output_item.done", output_index=step.number, item=item)

    def end(self) -> Iterator[dict[str, Any]]:
        body = self.body()
        yield self._event(f"response.{body['status']}", response=body)

    def fail(self, status: int, message: str) -> dict[str, Any]:
        code = "server_error" if status >= 500 else "invalid_prompt"
        failed = self._response("failed") | {"error": {"code": code, "message": message}}
        return self._event("response.failed", response=failed)

    def body(self) -> dict[str, Any]:
        return self._response("incomplete" if self.answer.reason == "length" else "completed")

    def _response(self, status: str) -> dict[str, Any]:
        given, choice, done = self.given, self.given.tool_choice, status in ("completed", "incomplete")
        shown = given.model_dump(by_alias=True, include={"instructions", "max_output_tokens", "temperature", "top_p"})
        short = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return shown | {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": short,
            "model": self.name,
            "output": [_item(block, "completed") for block in self.answer.blocks] if done else [],
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": given.text.model_dump(by_alias=True) if given.text else {"format": {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, Choice) else choice or "auto",
            "tools": [tool.model_dump() for tool in given.tools or ()],
            "usage": self._usage() if done else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        found = usage["completion_tokens_details"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0} | found,
            "total_tokens": usage["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1} | fields


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str) -> dict[str, Any]:
    """A block as an item of the output. What is in progress has no content yet."""
    content = [_part(block)] if status == "completed" else []
    if block.kind == "reasoning":
        return {"id": f"rs_{block.id}", "type": "reasoning", "summary": [], "content": content, "status": status}
    if block.kind == "text":
        about = {"id": f"msg_{block.id}", "type": "message", "role": "assistant"}
        return about | {"content": content, "status": status}
    call = {"call_id": block.call["id"], "name": block.call["function"]["name"]}
    about = {"id": f"fc_{block.id}", "type": "function_call", **call}
    return about | {"arguments": block.text if status == "completed" else "", "status": status}
