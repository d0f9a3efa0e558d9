"""Requests beside answers: POST /tokenize and /detokenize, and descriptions of the model."""

import asyncio
from typing import Any

from m3jax.serve.gateway.answers import token_text
from m3jax.serve.gateway.chat_completions import MODEL_FIELD, TOOL_CHOICE_FIELD, TOOLS_FIELD, tool_choice
from m3jax.serve.gateway.errors import refused
from m3jax.serve.gateway.fields import Fields, FixedField, FlagField, ListField, RequestField, TextField
from m3jax.serve.gateway.gateway import THINKING_FIELDS, Gateway, thinking_mode
from m3jax.serve.gateway.prompts import tokens_of
from m3jax.serve.gateway.sampling import Model


def fields_of_tokenize(model: Model) -> dict[str, RequestField]:
    """Return the fields of POST /tokenize."""
    return {
        "model": MODEL_FIELD,
        "prompt": TextField(about="a text"),
        "content": TextField(about="the same, as llama.cpp has it"),
        "messages": ListField(of={"type": "object", "required": ["role"]}, about="a conversation, as a chat has it"),
        "tools": TOOLS_FIELD,
        "tool_choice": TOOL_CHOICE_FIELD,
        **THINKING_FIELDS,
        "with_pieces": FlagField(about="give each token as an object of its id and its text"),
        "return_token_strs": FlagField(about="give the tokens' texts beside the ids"),
        # Nothing is ever added to a text: the chat template writes all special tokens.
        "add_special_tokens": FlagField(about="the tokenizer adds none either way"),
        "add_special": FlagField(about="the same"),
        "add_generation_prompt": FixedField(
            allowed=(True,), about="a conversation ends with the beginning of an answer: leave it out"
        ),
    }


async def tokenize(gateway: Gateway, fields: Fields, route: str) -> dict[str, Any]:
    """Return the token ids of a text ("prompt", or "content" as llama.cpp has it) or of a conversation ("messages").

    With `with_pieces` each token comes with its text, with `return_token_strs` the texts come beside the ids. A text
    that has more tokens than the context in any case is refused before it is tokenized, as a prompt is.
    """
    given = [name for name in ("prompt", "content", "messages") if name in fields]
    if len(given) != 1:
        raise refused("prompt", "give one of prompt (a text), content (the same) and messages (a conversation)")
    mode, choice = thinking_mode(fields, "adaptive"), tool_choice(fields)
    tokenizer = gateway.renderer.tokenizer
    if given == ["messages"]:
        tools = None if choice == "none" else fields["tools"] or None
        prompt = await gateway.renderer.render(fields["messages"], tools, mode, False)
        ids = list(prompt.ids)
    elif text := fields[given[0]]:
        sizes = gateway.model.vocab_size, gateway.model.context
        (ids,) = await asyncio.to_thread(tokens_of, tokenizer, text, given[0], *sizes)
    else:
        ids = []
    with_pieces, with_strings = fields["with_pieces"], fields["return_token_strs"]
    pieces = []
    if with_pieces or with_strings:
        pieces = await asyncio.to_thread(lambda: [token_text(tokenizer, token)[0] for token in ids])
    tokens = [{"id": token, "piece": piece} for token, piece in zip(ids, pieces, strict=True)] if with_pieces else ids
    answer = {"count": len(ids), "max_model_len": gateway.model.context, "tokens": tokens}
    return answer | ({"token_strs": pieces} if with_strings else {})


def fields_of_detokenize(model: Model) -> dict[str, RequestField]:
    """Return the fields of POST /detokenize."""
    token = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    return {"model": MODEL_FIELD, "tokens": ListField(is_required=True, of=token, about="token ids")}


async def detokenize(gateway: Gateway, fields: Fields, route: str) -> dict[str, Any]:
    """Return the text of token ids, special tokens included; they are at most as many as the context has."""
    ids, context = fields["tokens"], gateway.model.context
    if len(ids) > context:
        message = f"tokens: {len(ids)} token ids, and the model's context is {context}: send them in parts"
        raise refused("tokens", message, "context_length_exceeded")
    tokenizer = gateway.renderer.tokenizer
    if ids:
        (ids,) = tokens_of(tokenizer, [ids], "tokens", gateway.model.vocab_size, context)
    text = await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)
    return {"prompt": text, "content": text}


def tokenizer_info(gateway: Gateway) -> dict[str, Any]:
    """Return the special tokens and the template, which lm-eval asks for before it tokenizes here."""
    tokenizer = gateway.renderer.tokenizer
    name = lambda token: None if token is None else tokenizer.backend.id_to_token(token)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name(tokenizer.bos_id),
        "eos_token": name(tokenizer.eos_id),
        "pad_token": name(tokenizer.eos_id),
        "vocab_size": gateway.model.vocab_size,
        "chat_template": gateway.renderer.template.source,
        "add_bos_token": False,
    }


def models(gateway: Gateway) -> dict[str, Any]:
    """Return the list of models, in a form that OpenAI's and Anthropic's clients both read."""
    model = model_object(gateway, gateway.model.name)
    return {"object": "list", "data": [model], "first_id": model["id"], "last_id": model["id"], "has_more": False}


def model_object(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return the description of a model.

    Raises:
      ApiError: 404, it is not served here.
    """
    gateway.check_model(name)
    return {
        "id": name,
        "object": "model",
        "created": gateway.started,
        "owned_by": "m3jax",
        "max_model_len": gateway.model.context,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
