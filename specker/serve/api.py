"""The requests of the API, checked, and the parts of its answers. Unknown fields are refused, because a field that is
silently ignored changes the text."""

import json
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from specker import grammar
from specker.options import Params, Sampling, predicted

DEPTH = 100  # of lists and objects in a body; Python's recursion ends at 1000
MOST = 10_000  # names of an object, and lists and objects in a list: up to 30 us each, in which nobody is answered
CHECKED = dict, list, str, float
PLACE = 100  # characters of a place in messages
STOPS = 16  # stop strings: all are matched in every step
STOP_LENGTH = 256  # characters of one
SALT = 256  # characters of a cache_salt
SAMPLED = tuple(f.name for f in fields(Sampling) if f.name != "seed")

NO_TRUTH = "true and false are not allowed here"

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]  # a million wrong items would make a million errors, gigabytes


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, given: Any, about: ValidationInfo) -> Any:
        """pydantic takes true for the number 1."""
        kind = cls.model_fields[about.field_name or ""].annotation
        if isinstance(given, bool) and {kind, *get_args(kind)}.isdisjoint({bool, Any}):
            raise ValueError(NO_TRUTH)
        return given


class Body(Strict):
    """The body of a request.

    Attributes:
        ignored: fields that are left out, whatever they hold.
        neutral: fields that are not supported, and the values that mean nothing.
        drops_null: whether any field may be null, which means nothing.
    """

    ignored: ClassVar[set[str]] = set()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    drops_null: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        check_values(given)
        for name, values in cls.neutral.items():
            if given.get(name) is not None and given[name] not in values:
                raise ValueError(f"{name} is not supported")
        left_out = cls.ignored | {*cls.neutral}
        left_out |= {name for name, value in given.items() if cls.drops_null and value is None}
        return {name: value for name, value in given.items() if name not in left_out}


class StreamOptions(Strict):
    include_usage: bool = False


class Schema(BaseModel):
    name: str = "answer"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    def grammar(self) -> str | None:
        """What the text must match. Raises ValueError."""
        if self.type == "json_schema":
            if self.json_schema is None:
                raise ValueError("response_format json_schema needs json_schema")
            return grammar.json_schema(self.json_schema.schema_)
        return grammar.json_object() if self.type == "json_object" else None


class Asked(Body):
    """What both endpoints share."""

    ignored: ClassVar = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    neutral: ClassVar = {"functions": ([],)}
    drops_null = True

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[StrictInt] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    cache_prompt: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=SALT)] | None = None
    speculation: str | None = None
    prediction: str | None = None  # given in OpenAI's form
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, given: Any) -> Any:
        if isinstance(given, dict) and any(isinstance(value, bool) for value in given.values()):
            raise ValueError(NO_TRUTH)
        return given

    @field_validator("prediction", mode="before")
    @classmethod
    def _predicted(cls, given: Any) -> Any:
        if given is not None and not isinstance(given, dict):
            raise ValueError('it must be {"type": "content", "content": TEXT}')
        return predicted(given)

    @field_validator("stop")
    @classmethod
    def _short(cls, stop: str | list[str] | None) -> str | list[str] | None:
        given = [stop] if isinstance(stop, str) else stop or []
        if len(given) > STOPS or any(len(text) > STOP_LENGTH for text in given):
            raise ValueError(f"at most {STOPS} strings of at most {STOP_LENGTH} characters are allowed")
        return stop

    @model_validator(mode="after")
    def _best(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of must be n, {self.n}: all texts are returned")
        return self

    @property
    def texts(self) -> int:
        """How many texts are asked for."""
        return self.n

    @property
    def usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def params(
        self,
        usual: dict[str, float],
        room: int,
        logprobs: int,
        grammar: str | None,
        salt: str | None,
        prediction: Sequence[int],
    ) -> list[Params]:
        """The parameters of the `n` texts of a prompt. `usual`: sampling settings that the request may leave out;
        `room`: tokens, if it does not limit them; `salt`: if it has none; `prediction`: its token ids. Raises
        ValueError."""
        given = {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:  # keeps all
            given["top_k"] = 0
        given = {**usual, **given}
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**64
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [
            Params(
                self.max_tokens or max(1, room),
                Sampling(**given, seed=(seed + i) % 2**64),  # type: ignore[arg-type]
                tuple(stop),
                stop_ids=tuple(self.stop_token_ids or ()),
                logprobs=logprobs,
                prefix_cache=None if self.cache_prompt else "off",
                cache_salt=self.cache_salt or salt,
                grammar=grammar,
                ignore_eos=self.ignore_eos,
                min_tokens=self.min_tokens,
                policy=self.speculation,
                prediction=tuple(prediction),
            )
            for i in range(self.n)
        ]


def _kind(prompt: Any) -> str:
    """The tag of the type that a prompt should have, by its first item."""
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else 0
    return "list[str]" if isinstance(first, str) else "list[list[int]]" if isinstance(first, list) else "list[int]"


class Completion(Asked):
    prompt: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[Items[str], Tag("list[str]")]
        | Annotated[Items[StrictInt], Tag("list[int]")]  # "1" and true are no ids
        | Annotated[Items[Items[StrictInt]], Tag("list[list[int]]")],
        Discriminator(_kind),  # a union without it tries each type on each item
    ]
    suffix: str = ""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = 16  # OpenAI's

    @model_validator(mode="after")
    def _shown(self) -> Self:
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError("suffix needs a prompt that is a text")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo and logprobs exclude each other: a prompt's tokens have no log-probabilities")
        return self

    @property
    def texts(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]  # type: ignore[return-value]


class Function(BaseModel):
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class Named(BaseModel):
    name: str


class Choice(Strict):
    type: Literal["function"]
    function: Named


class Called(BaseModel):
    model_config = ConfigDict(extra="allow")
    arguments: Any = None

    @field_validator("arguments", mode="before")
    @classmethod
    def _parsed(cls, given: Any) -> Any:
        """As chat templates read them: no text, but what it says."""
        try:
            found = json.loads(given)
        except (TypeError, ValueError, RecursionError):
            raise ValueError("must be a string with JSON in it") from None
        check_values(found)
        return found


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")
    function: Called


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")  # templates read more: tool_call_id, name, reasoning_content
    role: str
    content: str | None = None
    tool_calls: Items[ToolCall] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, parts: Any) -> Any:
        """One text, as chat templates read it."""
        if not isinstance(parts, list):
            return parts
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            raise ValueError("the parts of a message's content must be texts")
        try:
            return "".join(part.get("text") for part in parts)
        except TypeError:
            raise ValueError("the text of a part must be a string") from None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        out = {name: value for name, value in self.model_dump().items() if value is not None}
        return out | {"content": self.content or ""}


class Chat(Asked):
    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: Items[str] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None  # by default, unless the final message is continued

    @field_validator("modalities")
    @classmethod
    def _texts_only(cls, given: list[str] | None) -> list[str] | None:
        if others := [name for name in given or () if name != "text"]:
            raise ValueError(f"answers are text, {others[0]!r} is not supported")
        return given

    @model_validator(mode="after")
    def _consistent(self) -> "Chat":
        last = self.messages[-1]
        if self.add_generation_prompt is None:
            self.add_generation_prompt = not self.continue_final_message
        elif self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.continue_final_message and (last.role != "assistant" or not last.content or last.tool_calls):
            raise ValueError("continue_final_message needs an assistant's text as the last message")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        name, count = next(iter(Counter(tool.function.name for tool in self.tools or ()).most_common(1)), ("", 0))
        if count > 1:
            raise ValueError(f"{count} tools are named {name!r}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.tools and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("tools and response_format exclude each other")
        return self


class Tokenize(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None


def check_values(given: Any, names: tuple[str | int, ...] = ()) -> None:
    """Refuse what JSON allows and later steps cannot take. `names`: where it is in the body. Raises ValueError."""
    if len(names) > DEPTH:
        raise ValueError(f"lists and objects are nested more than {DEPTH} deep")
    if isinstance(given, dict):
        if len(given) > MOST:
            raise ValueError(f"{_at(names)}an object has more than {MOST:,} names")
        for name, value in given.items():
            check_values(name, names)
            if isinstance(value, CHECKED):
                check_values(value, (*names, name))
    elif isinstance(given, list):
        types = {*map(type, given)}
        if types.isdisjoint(CHECKED):  # millions of ids are looked at in C
            return
        if len(given) > MOST and types & {dict, list}:
            raise ValueError(f"{_at(names)}a list has more than {MOST:,} lists and objects")
        for n, value in enumerate(given):
            if isinstance(value, CHECKED):
                check_values(value, (*names, n))
    elif isinstance(given, float) and not math.isfinite(given):  # an answer that shows it would be no JSON
        raise ValueError(f"{_at(names)}the number is not finite")
    elif isinstance(given, str) and not given.isascii():
        try:
            given.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{_at(names)}the text has half of a surrogate pair") from None


def place(names: Sequence[str | int]) -> str:
    """Where something is in the body: messages[3].content."""
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)[:PLACE].removeprefix(".")


def _at(names: Sequence[str | int]) -> str:
    """The place, as a message begins with it."""
    return f"{place(names)}: " if names else ""
