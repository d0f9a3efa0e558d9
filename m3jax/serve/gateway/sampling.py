"""The knobs of a request, in any of the protocols, as the worker's sampling parameters."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from m3jax.messages import shown
from m3jax.serve.gateway.errors import refused
from m3jax.serve.gateway.fields import (
    Fields,
    FlagField,
    IntegerField,
    ListField,
    NumberField,
    ObjectField,
    RequestField,
    TextsField,
)

MAX_SEED = 2**31 - 1  # the protocol's seed is an int32
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_N = 128


@dataclass(frozen=True)
class Model:
    """The model that a gateway's workers serve, as far as the gateway knows it.

    Attributes:
      name: under which clients ask for it.
      context: tokens that a request can have, prompt and answer together.
      vocab_size: ids are below it.
      eos_ids: tokens that end an answer.
      can_see: True if it takes images and videos.
      block_size: tokens of a block of its sparse attention, as far as the worker says.
      defaults: temperature, top_p and so on where a request does not say.
    """

    name: str
    context: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    can_see: bool
    block_size: int
    defaults: Mapping[str, float]

    @classmethod
    def of(cls, info: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse, name: str | None = None) -> "Model":
        """Return what a worker says of itself.

        Args:
          info, server: of the worker.
          name: instead of the worker's own.
        """
        return cls(
            name=name or info.served_model_name or info.model_path,
            context=info.max_context_length,
            vocab_size=info.vocab_size,
            eos_ids=tuple(info.eos_token_ids),
            can_see=info.supports_vision,
            block_size=server.block_size,
            defaults=json.loads(info.default_sampling_params_json or "{}"),
        )


def sampling_fields(model: Model, stop_field: str = "stop", max_temperature: float = 2.0) -> dict[str, RequestField]:
    """Return the fields that all protocols have in common: how tokens are drawn, and what ends an answer.

    Args:
      model: whose defaults count where a request is silent, and whose sizes are the ranges.
      stop_field: the protocol's name for stop strings.
      max_temperature: of the protocol.
    """
    default = lambda name, otherwise: float(model.defaults.get(name, otherwise))
    least_token, most_token = 0, model.vocab_size - 1
    token = {"type": "integer", "minimum": least_token, "maximum": most_token}
    return {
        "temperature": NumberField(
            default=default("temperature", 1.0),
            least=0.0,
            most=max_temperature,
            about="0 takes the most probable token",
        ),
        "top_p": NumberField(default=default("top_p", 1.0), least=0.0, most=1.0, is_above=True),
        "top_k": IntegerField(
            default=int(default("top_k", 0)), least=-1, most=model.vocab_size, about="0 and -1 leave all tokens in"
        ),
        "min_p": NumberField(default=default("min_p", 0.0), least=0.0, most=1.0),
        "frequency_penalty": NumberField(default=0.0, least=-2.0, most=2.0),
        "presence_penalty": NumberField(default=0.0, least=-2.0, most=2.0),
        "repetition_penalty": NumberField(
            default=default("repetition_penalty", 1.0), least=0.0, most=100.0, is_above=True
        ),
        "min_tokens": IntegerField(default=0, least=0, most=model.context, about="before which no stop counts"),
        "ignore_eos": FlagField(about="go on behind the end of the answer, up to max_tokens"),
        "n": IntegerField(default=1, least=1, most=MAX_N, about="answers to one prompt"),
        "seed": IntegerField(least=0, most=MAX_SEED, about="drawn where it is not given"),
        stop_field: TextsField(most=MAX_STOPS, about="an answer ends before the first of them"),
        "stop_token_ids": ListField(default=(), of=token, about="an answer ends with the first of them"),
        "logit_bias": ObjectField(
            inside={"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
            about=f"added to the logits of tokens, by their ids from {least_token} to {most_token} as text",
        ),
    }


def sampling_params(fields: Fields, model: Model, stop_field: str = "stop") -> pb.SamplingParams:
    """Return the worker's parameters of a request that has `sampling_fields`.

    The seed of a request that gives none is drawn here, so that the request can be repeated.

    Args:
      fields: of the request.
      model: of the gateway.
      stop_field: as in `sampling_fields`.

    Returns:
      All but the number of tokens, which depends on the prompt, and log-probabilities.

    Raises:
      ApiError: a token that the model does not have.
    """
    as_they_are = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    as_they_are += ("min_tokens", "ignore_eos", "n")
    params = pb.SamplingParams(
        **{name: fields[name] for name in as_they_are},
        top_k=max(0, fields["top_k"]),
        seed=secrets.randbelow(MAX_SEED) if fields["seed"] is None else fields["seed"],
        stop=fields[stop_field],
        stop_token_ids=_stop_ids(fields["stop_token_ids"], model),
        skip_special_tokens=False,
    )
    for token, bias in _logit_bias(fields["logit_bias"] or {}, model).items():
        params.logit_bias[token] = bias
    return params


def limit_tokens(params: pb.SamplingParams, model: Model, prompt_tokens: int, asked: int | None, field: str) -> None:
    """Set how many tokens an answer may have: as many as were asked for, as far as the context has room.

    Args:
      params: changed in place.
      model: whose context it is.
      prompt_tokens: of the prompt.
      asked: the client's limit; None asks for all there is room for. Clients send limits far above any context.
      field: of the prompt, for the error.

    Raises:
      ApiError: the prompt leaves no room for a single token.
    """
    room = model.context - prompt_tokens
    if room < 1:
        raise refused(
            field, f"the prompt has {prompt_tokens} tokens, and the model's context is {model.context}: shorten it",
            "context_length_exceeded",
        )  # fmt: skip
    params.max_tokens = room if asked is None else min(asked, room)
    if params.min_tokens > params.max_tokens:
        raise refused("min_tokens", f"min_tokens = {params.min_tokens}: at most {params.max_tokens} tokens can come")


def _stop_ids(ids: Sequence[Any], model: Model) -> Sequence[int]:
    if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < model.vocab_size for token in ids):
        raise refused(
            "stop_token_ids", f"stop_token_ids = {shown(ids)}: must be token ids from 0 to {model.vocab_size - 1}"
        )
    return ids


def _logit_bias(given: Mapping[str, Any], model: Model) -> dict[int, float]:
    """Return the bias of each token; JSON writes the ids as text."""
    biases: dict[int, float] = {}
    for name, bias in given.items():
        is_token = name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < model.vocab_size
        if not is_token or not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise refused(
                "logit_bias",
                f"logit_bias has {shown(name)}: {shown(bias)}: must be a token id from 0 to {model.vocab_size - 1} as "
                "text, with a number from -100 to 100",
            )
        biases[int(name)] = float(bias)
    return biases


# The two ways to constrain an answer, of which a request may have one.
FORMAT_FIELD = ObjectField(
    inside={"properties": {"type": {"enum": ["text", "json_object", "json_schema"]}}, "required": ["type"]},
    about="text; json_object; or json_schema, with the schema in json_schema.schema",
)
CONSTRAINT_FIELDS: Mapping[str, RequestField] = {
    "response_format": FORMAT_FIELD,
    "structured_outputs": ObjectField(
        inside={
            "properties": {
                "regex": {"type": ["string", "null"]},
                "grammar": {"type": ["string", "null"]},
                "choice": {"type": ["array", "null"], "items": {"type": "string"}, "minItems": 1},
                "json": {"type": ["string", "object", "null"]},
            },
            "additionalProperties": {"type": "null"},
        },
        about="vLLM's: one of regex, grammar (Lark or GBNF), choice and json (a schema)",
    ),
}


def response_format(given: Mapping[str, Any] | None, params: pb.SamplingParams, name: str = "response_format") -> None:
    """Set the constraint that OpenAI's response_format asks for.

    Args:
      given: the field's value; None asks for text.
      params: changed in place.
      name: of the field, for errors.

    Raises:
      ApiError: no such format, or a schema that is no object.
    """
    kind = given.get("type") if given is not None else "text"
    if kind == "text":
        return
    if kind == "json_object":
        params.json_object = True
    elif kind == "json_schema":
        # The Responses API has the schema in the format itself.
        schema = (given["json_schema"] if isinstance(given.get("json_schema"), dict) else given).get("schema")
        if not isinstance(schema, dict):
            raise refused(name, f"{name}: json_schema.schema = {shown(schema)}: must be a JSON schema")
        params.json_schema = json.dumps(schema)
    else:
        raise refused(name, f"{name}: type = {shown(kind)}: must be text, json_object or json_schema")


def set_constraints(fields: Fields, params: pb.SamplingParams) -> None:
    """Set the constraint that a request with `CONSTRAINT_FIELDS` asks for.

    Args:
      fields: of the request.
      params: changed in place.

    Raises:
      ApiError: both fields, not exactly one constraint, or one of another type.
    """
    response_format(fields["response_format"], params)
    given: Any = fields["structured_outputs"]
    if given is None:
        return
    wanted = {name: value for name, value in given.items() if value is not None}
    name, value = next(iter(wanted.items()), (None, None))
    if len(wanted) != 1 or name not in ("regex", "grammar", "choice", "json"):
        raise refused("structured_outputs", f"structured_outputs = {shown(given)}: one of regex, grammar, choice, json")
    if params.WhichOneof("constraint"):
        raise refused("structured_outputs", "structured_outputs and response_format: give one of the two")
    if name in ("regex", "grammar") and isinstance(value, str):
        setattr(params, name, value)
    elif name == "choice" and isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        params.choice.choices.extend(value)
    elif name == "json" and isinstance(value, str | dict):
        params.json_schema = value if isinstance(value, str) else json.dumps(value)
    else:
        raise refused("structured_outputs", f"structured_outputs: {name} = {shown(value)} has another type")


def check_constraints(params: pb.SamplingParams, has_forced_call: bool) -> None:
    """Refuse two constraints at once: an answer that is JSON and a call too."""
    if has_forced_call and params.WhichOneof("constraint"):
        raise refused("response_format", "response_format and a forced tool_choice: an answer can be one of the two")
