"""Bodies of requests, as OpenAI and vLLM name their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_CHOICES = 128
MOST_LOGPROBS = 20
_MOST_STOPS = 16
_LEAST_TEMPERATURE = 0.01

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]

# What is accepted where it asks for nothing, and refused by its name otherwise.
_NOT_COVERED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "lora_request": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class Body(BaseModel):
    """A body whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_uncovered(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in values.keys() & _NOT_COVERED.keys():
            value = values[name]
            if value is not None and value not in _NOT_COVERED[name]:
                raise ValueError(f"{name}: not covered by this server, leave it out")
        return {name: value for name, value in values.items() if name not in _NOT_COVERED}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class Sampled(Body):
    """Fields that completions and chats have in common; without a value the model's default."""

    model: str | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: dict[str, str] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    seed: Seed | None = None
    skip_special_tokens: bool = True
    stop: str | Annotated[list[str], Field(max_length=_MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MOST_STOPS)] | None = None
    store: Literal[False] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    user: str | None = None

    @field_validator("stop")
    @classmethod
    def _some_text(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if any(not each for each in ([stop] if isinstance(stop, str) else stop or ())):
            raise ValueError("a stop string is empty: leave it out")
        return stop

    @field_validator("temperature")
    @classmethod
    def _not_too_small(cls, temperature: float | None) -> float | None:
        # Logits that are divided by less are infinite.
        if temperature is not None and 0 < temperature < _LEAST_TEMPERATURE:
            return _LEAST_TEMPERATURE
        return temperature

    @model_validator(mode="after")
    def _options_of_streams_alone(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: add stream, or leave them out")
        return self

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


TokenIds = list[TokenId]


class CompletionBody(Sampled):
    """The body of `/v1/completions`."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    add_special_tokens: bool = True
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """Text of all parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(Sampled):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: add them, or leave both out")
        return self


class TokenizeBody(Body):
    """The body of `/tokenize`: a prompt, or messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds
