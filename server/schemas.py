"""What requests hold: OpenAI's fields, vLLM's additions, and a few of ours. Unknown fields are ignored."""
from __future__ import annotations

import random
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sampling.options import MOST_LOGPROBS, MOST_STOPS, Sampling

Tokens = Annotated[int, Field(ge=1, le=1 << 20)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class Part(BaseModel):
    """A part of a message's content. Only text is understood."""

    model_config = ConfigDict(extra="ignore")
    type: str
    text: str | None = None


class FunctionCall(BaseModel):
    """What a call names: a function, and its arguments as JSON."""

    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(BaseModel):
    """A call that the model made."""

    model_config = ConfigDict(extra="ignore")
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool | None = None


class JsonSchema(BaseModel):
    """A schema that the output is to fit."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: str = ""
    definition: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """The form of the output."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool; there are functions only."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["function"] = "function"
    function: Function


class Request(BaseModel):
    """What both kinds of completions take."""

    model_config = ConfigDict(extra="ignore")
    model: str | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(None, description="-1 and 0 are off")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    speculate: bool | None = Field(None, description="false: decode this request without drafts")
    return_speculation: bool | None = Field(None, description="tell what was drafted, and each step's tree")

    def sampling(
        self, choice: int, most: int, seed: int, logprobs: int | None, schema: str | None
    ) -> Sampling:
        """How choice number `choice` is decoded. seed: if the request has none. Raises ValueError."""
        stop = self.stop or ()
        return Sampling(
            max_new_tokens=max(1, most),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p, top_k=max(0, self.top_k or 0),
            seed=(seed if self.seed is None else self.seed) + choice, min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0, frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0, logit_bias=self.logit_bias or (),
            stop=stop, logprobs=logprobs, json_schema=schema,
        )

    @staticmethod
    def new_seed() -> int:
        """A seed for a request that has none."""
        return random.getrandbits(48)


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )


class CompletionRequest(Request):
    """POST /v1/completions."""

    max_tokens: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    suffix: str | None = None


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or a conversation."""

    model_config = ConfigDict(extra="ignore")
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="ignore")
    tokens: list[TokenId]
