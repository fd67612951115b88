"""The HTTP protocol: bodies of requests (OpenAI's fields, vLLM's additions, a few of ours), and errors."""
from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, field_validator, model_validator

from common.errors import printable
from common.schema import invalid_value
from engine.sampling import MAX_LOGPROBS, MAX_STOPS, Sampling
from tokens.calls import schema_of_calls
from tokens.grammar import ANY_OBJECT, grammar_of_choices, grammar_of_regex
from tokens.limits import Limits

RETRY_AFTER = "2"  # seconds
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RESERVED = {"messages", "tools", "self"}  # template variables that the body sets
EFFORT = "reasoning_effort"
VARIABLES = {EFFORT, "add_generation_prompt", "continue_final_message"}  # fields that are template variables
# Fields with the same name in `Sampling`.
SAMPLING_FIELDS = {
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
}

# Unsupported fields of other servers -> the value that has no effect; field -> our field to use instead.
FIELDS_FILE = Path(__file__).with_name("unsupported_fields.json")
UNSUPPORTED, REPLACEMENTS = json.loads(FIELDS_FILE.read_text()).values()
TokenCount = Annotated[int, Field(ge=1, le=1 << 20)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Choices = Annotated[list[str], Field(max_length=1024)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
ParseSpecial = Annotated[bool, Field(description="false: control tokens spelled out in a prompt are text")]


class Refusal(Exception):
    """An error response in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict:
        """Return the JSON of the response."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": ERROR_TYPES.get(self.status, default),
                          "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response."""
        headers = {"Retry-After": RETRY_AFTER} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)


def refusal_of_body(errors: list[dict], headers: Mapping[str, str]) -> Refusal:
    """Return the response to a body with these errors of pydantic."""
    # In a union, report the error of the member whose type matches.
    first = next((error for error in errors if not error["type"].endswith("_type")), errors[0])
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        return Refusal(400, f"the body is not JSON: {why} (character {first['loc'][-1]})", "invalid_json")
    path = first["loc"][1:]
    if not path and "json" not in headers.get("content-type", ""):
        return Refusal(400, "the body: JSON is expected, and Content-Type: application/json", "invalid_value")
    error = invalid_value(first, path, "the body")
    message, where = str(error), printable(error.key) if path else None
    if first["type"] == "value_error":  # our own ValueError; those of whole bodies name the field
        message = (f"{where}: " if where else "") + first["msg"].removeprefix("Value error, ")
    return Refusal(400, printable(message, 1500), "invalid_value", where)


class Body(BaseModel):
    """A JSON object. Unknown fields are ignored; null is the same as an absent field."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class Strict(Body):
    """A body that rejects the fields of `UNSUPPORTED`, as ignoring them would change the output."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name in UNSUPPORTED.keys() & data.keys() if isinstance(data, dict) else ():
            if data[name] not in (None, UNSUPPORTED[name]) and (data[name] or UNSUPPORTED[name]):
                advice = f"; use {REPLACEMENTS[name]}" if name in REPLACEMENTS else "; leave it out"
                raise ValueError(f"{name}: not supported{advice}")
        return data


class FunctionCall(Body):
    """A function's name, and its arguments: an object, its JSON, or [] for no arguments."""

    name: str
    arguments: dict[str, Any] | str | Annotated[list, Field(max_length=0)] = {}


class ToolCall(Body):
    """A tool call of the model."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body, extra="allow"):
    """A chat message, see `tokens.messages: normalize`. Other fields are passed to the template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any] | str] | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None


class Function(Body, extra="allow"):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool; only functions exist."""

    type: Literal["function"] = "function"
    function: Function


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class ResponseFormat(Body):
    """The output format. The schema is in `json_schema`, or in `schema` as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] = {}
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @property
    def text(self) -> str | None:
        """The JSON schema as text, None if the output is free. Raises ValueError if it is missing."""
        schema = self.json_schema.get("schema", self.schema_)
        if self.type == "json_schema" and not isinstance(schema, dict):
            raise ValueError("response_format: json_schema needs a schema")
        any_object = self.type == "json_object" and not schema
        return None if self.type == "text" else ANY_OBJECT if any_object else json.dumps(schema)


class StructuredOutputs(Body, extra="forbid"):
    """vLLM's field for structured outputs."""

    json_: Annotated[dict[str, Any] | str, Field(alias="json")] = {}
    json_object: bool = False
    regex: str = ""
    choice: Choices = []
    grammar: str = ""


class GenerationBody(Strict):
    """The fields of completions and chat completions."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31, description="-1 and 0 are off")] = 0
    min_p: Probability = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()
    json_schema: Annotated[dict[str, Any] | str, Field(description="as llama.cpp has it")] = {}
    guided_json: Annotated[dict[str, Any] | str, Field(description="as vLLM had it")] = {}
    guided_choice: Choices = []
    guided_regex: str = ""
    guided_grammar: Annotated[str, Field(description="GBNF or Lark")] = ""
    regex: Annotated[str, Field(description="as SGLang has it")] = ""
    ebnf: Annotated[str, Field(description="as SGLang has it")] = ""
    grammar: Annotated[str, Field(description="as llama.cpp has it")] = ""
    structured_outputs: StructuredOutputs = StructuredOutputs()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = []
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=64)] = []
    min_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    ignore_eos: bool = False
    speculate: Annotated[bool, Field(description="false: decode this request without drafts")] = True
    return_speculation: Annotated[bool, Field(description="add each step's drafted tree to a stream")] = False

    @property
    def constraints(self) -> list[tuple[str, str]]:
        """The constraints of the output: ("json" or "grammar", text). At most one is allowed."""
        other = self.structured_outputs
        schemas = self.json_schema, self.guided_json, other.json_, other.json_object and ANY_OBJECT
        constraints = [("json", x if isinstance(x, str) else json.dumps(x)) for x in schemas if x]
        constraints += [("json", text)] if (text := self.response_format.text) is not None else []
        choices, regexes = (self.guided_choice, other.choice), (self.guided_regex, self.regex, other.regex)
        grammars = [grammar_of_regex(x) for x in regexes if x] + [grammar_of_choices(x) for x in choices if x]
        grammars += filter(None, (self.guided_grammar, self.grammar, self.ebnf, other.grammar))
        return constraints + [("grammar", text) for text in grammars]

    def samplings(self, default_max_tokens: int) -> list[Sampling]:
        """Return the sampling options of `n` choices, with consecutive seeds from `seed` on.

        Raises ValueError.
        """
        constraints = dict.fromkeys(self.constraints)
        if len(constraints) > 1:
            raise ValueError("several fields constrain the output (a schema, choice, regex, grammar);"
                             " set only one of them")
        (constraint, text), = constraints or {("", None): None}
        limits = Limits(
            text if constraint == "grammar" else None, tuple(self.stop_token_ids), tuple(self.bad_words),
            self.min_tokens, self.ignore_eos)
        seed = random.getrandbits(48) if self.seed is None else self.seed
        options = self.model_dump(include=SAMPLING_FIELDS) | {
            "max_new_tokens": self.token_limit or default_max_tokens, "top_k": max(0, self.top_k),
            "stop": self.stop or (), "logprobs": self.logprob_count,
            "json_schema": text if constraint == "json" else None,
            "limits": None if limits == Limits() else limits,
        }
        return [Sampling(seed=seed + i, **options) for i in range(self.n)]


class Conversation(Body):
    """The fields that a chat template gets."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    tools: Annotated[list[Tool], Field(max_length=128)] = []
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="variables of the chat template, such as enable_thinking")
    ] = {}
    reasoning_effort: Annotated[
        str | None, Field(max_length=64, description="a variable of the chat template")
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Field(description="continue the last message, as its field prefix: true does")
    ] = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check(cls, variables: dict) -> dict:
        if reserved := RESERVED & variables.keys():
            raise ValueError(f"{', '.join(sorted(reserved))} cannot be set in chat_template_kwargs")
        return variables

    @property
    def dicts(self) -> list[dict]:
        """The messages, without fields that are null."""
        return [message.model_dump(exclude_none=True) for message in self.messages or ()]

    @property
    def variables(self) -> dict:
        """The variables of the chat template, including tools if there are any."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        fields = self.model_dump(include=VARIABLES, exclude_none=True)
        for key in fields.keys() & self.chat_template_kwargs.keys() - {EFFORT}:
            if self.chat_template_kwargs[key] != fields[key]:
                raise ValueError(f"{key}: the body and chat_template_kwargs contradict each other")
        return fields | self.chat_template_kwargs | ({"tools": tools} if tools else {})

    @property
    def continues(self) -> bool:
        """True if the last message is to be continued."""
        prefix = getattr(self.messages[-1], "prefix", False) is True
        return bool(self.variables.get("continue_final_message", prefix))


class ChatBody(GenerationBody, Conversation):
    """POST /v1/chat/completions."""

    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    parallel_tool_calls: bool = True

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens of the output; None: the server's default."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """Number of top log-probabilities per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else self.top_logprobs

    @model_validator(mode="after")
    def _choose(self) -> ChatBody:
        """Keep the tools that may be called."""
        if self.tool_choice == "none":
            self.tools = []
        elif self.tool_choice != "auto" and not self.callable:
            problem = "the function is not in tools" if self.tools else "needs tools"
            raise ValueError(f"tool_choice: {problem}")
        return self

    @property
    def callable(self) -> dict[str, dict]:
        """The functions that may be called: name -> JSON schema of the parameters."""
        name = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        parameters = {tool.function.name: tool.function.parameters or {} for tool in self.tools}
        return parameters if name is None else {name: parameters[name]} if name in parameters else {}

    @property
    def is_forced(self) -> bool:
        """True if the output must be a tool call."""
        return self.tool_choice not in ("auto", "none")

    @property
    def constraints(self) -> list[tuple[str, str]]:
        """See `GenerationBody.constraints`."""
        return [("json", schema_of_calls(self.callable))] if self.is_forced else super().constraints


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str] | list[TokenId] | list[list[TokenId]], Field(min_length=1)]
    parse_special: ParseSpecial = True
    max_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def token_limit(self) -> int:
        """Maximum tokens of the output."""
        return max(1, self.max_tokens)

    @property
    def logprob_count(self) -> int | None:
        """See `ChatBody.logprob_count`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_single else self.prompt


class TokenizeBody(Conversation):
    """POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    parse_special: ParseSpecial = True

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[TokenId]
