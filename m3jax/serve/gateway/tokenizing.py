"""Requests beside answers: POST /tokenize and /detokenize, and descriptions of the model."""

import asyncio
from typing import Any

from m3jax.serve.gateway.answers import token_text
from m3jax.serve.gateway.chat_completions import tool_choice
from m3jax.serve.gateway.errors import refused
from m3jax.serve.gateway.fields import Fields
from m3jax.serve.gateway.gateway import Gateway, thinking_mode
from m3jax.serve.gateway.prompts import tokens_of


async def tokenize(gateway: Gateway, body: dict[str, Any], route: str) -> dict[str, Any]:
    """Return the token ids of a text ("prompt", or "content" as llama.cpp has it) or of a conversation ("messages").

    With `with_pieces` each token comes with its text, with `return_token_strs` the texts come beside the ids.
    """
    fields = Fields(body)
    gateway.check_model(fields)
    given = [name for name in ("prompt", "content", "messages") if fields.is_given(name)]
    if len(given) != 1:
        raise refused("prompt", "give one of prompt (a text), content (the same) and messages (a conversation)")
    messages = fields.list("messages")
    if messages is not None:
        tools = fields.list("tools") if tool_choice(fields) != "none" else None
        prompt = await gateway.renderer.render(messages, tools or None, thinking_mode(fields, "adaptive"), False)
        ids = list(prompt.ids)
    else:
        text = fields.text(given[0])
        ids = await asyncio.to_thread(gateway.renderer.tokenizer.encode, text) if text else []
    # Nothing is ever added to a text: the chat template writes all special tokens.
    fields.only("add_special_tokens", (True, False), "must be true or false")
    fields.only("add_special", (True, False), "must be true or false")
    fields.only("add_generation_prompt", (True,), "a conversation ends with the beginning of an answer")
    with_pieces, with_strings = fields.flag("with_pieces"), fields.flag("return_token_strs")
    fields.finish()
    pieces = [token_text(gateway.renderer.tokenizer, token)[0] for token in ids] if with_pieces or with_strings else []
    tokens = [{"id": token, "piece": piece} for token, piece in zip(ids, pieces, strict=True)] if with_pieces else ids
    answer = {"count": len(ids), "max_model_len": gateway.model.context, "tokens": tokens}
    return answer | ({"token_strs": pieces} if with_strings else {})


async def detokenize(gateway: Gateway, body: dict[str, Any], route: str) -> dict[str, Any]:
    """Return the text of token ids, special tokens included."""
    fields = Fields(body)
    gateway.check_model(fields)
    tokens = fields.list("tokens")
    if tokens is None:
        raise refused("tokens", "tokens: must be a list of token ids")
    fields.finish()
    ids = []
    if tokens:
        sizes = gateway.model.vocab_size, gateway.model.context
        ids = tokens_of(gateway.renderer.tokenizer, tokens, "tokens", *sizes)[0]
    text = gateway.renderer.tokenizer.decode(ids, skip_special_tokens=False)
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
    gateway.check_model(Fields({"model": name}))
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
