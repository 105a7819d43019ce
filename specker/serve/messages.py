"""`POST /v1/messages`: Anthropic's Messages as a chat."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from specker.answers.tool_formats import JSON
from specker.serve.api import Items, Strict
from specker.serve.blocks import Block, BlockAnswer, Step, Translated, joined
from specker.serve.errors import KINDS

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}  # others are end_turn


class Part(BaseModel):
    """A block of a message."""

    model_config = ConfigDict(extra="allow")  # cache_control, citations, signature
    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, given: Any) -> Any:
        return joined(given, ["text"])

    @model_validator(mode="after")
    def _whole(self) -> "Part":
        needs = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name", "input")}
        for name in needs.get(self.type, ("tool_use_id",)):
            if getattr(self, name) is None:
                raise ValueError(f"a {self.type} needs {name}")
        return self


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Items[Part]

    @field_validator("content", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return [{"type": "text", "text": given}] if isinstance(given, str) else given

    def of_chat(self) -> Iterator[dict[str, Any]]:
        """As messages of a chat: the results of tools are messages of their own, and come first."""
        results = [part for part in self.content if part.type == "tool_result"]
        for part in results:
            yield {"role": "tool", "tool_call_id": part.tool_use_id, "content": part.content or ""}
        calls = [
            {"id": p.id, "type": "function", "function": {"name": p.name, "arguments": json.dumps(p.input)}}
            for p in self.content
            if p.type == "tool_use"
        ]
        texts = [part.text for part in self.content if part.text is not None and part.type == "text"]
        thoughts = [part.thinking for part in self.content if part.thinking is not None and part.type == "thinking"]
        said: dict[str, Any] = {"content": "".join(texts)} if texts else {}
        said |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        said |= {"tool_calls": calls} if calls else {}
        if said or not results:
            yield {"role": self.role, **said}


class Tool(Strict):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None


class Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def of_chat(self) -> Any:
        """As `tool_choice`."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return {"any": "required"}.get(self.type, self.type)


class Form(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class Output(Strict):
    format: Form | None = None


class Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized"] | None = None

    def variables(self) -> dict[str, Any]:
        """As variables of chat templates: those of Qwen3, DeepSeek-V3.1 and Seed-OSS. A template ignores others."""
        if self.type == "adaptive":
            return {}
        on = self.type == "enabled"
        budget = self.budget_tokens if on else 0
        return {"enable_thinking": on, "thinking": on} | ({} if budget is None else {"thinking_budget": budget})


class Conversation(Translated):
    """What `count_tokens` counts."""

    ignored: ClassVar = {"metadata", "service_tier", "cache_control"}
    neutral: ClassVar = {"container": (), "mcp_servers": ([],)}
    names: ClassVar = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "parameters": "input_schema",
    }

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    messages: Items[Turn] = Field(min_length=1)
    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    tools: Items[Tool] | None = None
    tool_choice: Choice | None = None
    output_config: Output | None = None
    thinking: Thinking | None = None

    @field_validator("system", mode="before")
    @classmethod
    def _joined(cls, given: Any) -> Any:
        return joined(given, ["text"])

    def of_chat(self) -> dict[str, Any]:
        """The answer continues a last message of the assistant."""
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            for tool in self.tools or ()
        ]
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages += [message for turn in self.messages for message in turn.of_chat()]
        last, choice = messages[-1], self.tool_choice
        continues = last["role"] == "assistant" and "tool_calls" not in last
        if continues and not last.get("content"):
            raise ValueError(
                "messages: the last one is the assistant's, so it needs a text, which the answer continues"
            )
        form = self.output_config.format if self.output_config else None
        return {
            "messages": messages,
            "stop": self.stop_sequences or None,
            "tools": [{"type": "function", "function": tool} for tool in tools] or None,
            "tool_choice": choice.of_chat() if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "response_format": {"type": "json_schema", "json_schema": {"schema": form.schema_}} if form else None,
            "chat_template_kwargs": self.thinking.variables() if self.thinking else None,
            "continue_final_message": continues,
        }


class MessagesRequest(Conversation):
    max_tokens: Annotated[int, Field(ge=1)]


class MessagesAnswer(BlockAnswer):
    kind = "msg_"

    def begin(self) -> Iterator[dict[str, Any]]:
        usage = {"input_tokens": self.usage()["prompt_tokens"], "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, usage)}

    def step(self, step: Step) -> Iterator[dict[str, Any]]:
        block, about = step.block, {"index": step.number}
        if step.what == "begin":
            yield {"type": "content_block_start", **about, "content_block": _block(block)}
        elif step.what == "more":
            kind, name = {
                "text": ("text_delta", "text"),
                "reasoning": ("thinking_delta", "thinking"),
                "call": ("input_json_delta", "partial_json"),
            }[block.kind]
            yield {"type": "content_block_delta", **about, "delta": {"type": kind, name: step.new}}
        else:
            yield {"type": "content_block_stop", **about}

    def end(self) -> Iterator[dict[str, Any]]:
        body = self.body()
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": body["usage"]}
        yield {"type": "message_stop"}

    def fail(self, status: int, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": KINDS.get(status, "api_error"), "message": message}}

    def body(self) -> dict[str, Any]:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
        counts |= {"cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"]}
        content = [_block(block) | _content(block) for block in self.answer.blocks]
        return self._message(content, self.answer.reason, counts)

    def _message(self, content: list[dict[str, Any]], reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        stop = self._stop_sequence() if reason == "stop" else None
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.name,
            "content": content,
            "stop_reason": "stop_sequence" if stop else REASONS.get(reason, "end_turn") if reason else None,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _stop_sequence(self) -> str | None:
        """The stop string that ended the text; None if something else did."""
        reader = self.call.requests[0].reader
        return reader.stopped_by if reader is not None else None


def _block(block: Block) -> dict[str, Any]:
    """A block before it has content."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call["id"], "name": block.call["function"]["name"], "input": {}}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"input": JSON.decode(block.text)}
    return {"text" if block.kind == "text" else "thinking": block.text}
