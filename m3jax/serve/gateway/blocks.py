"""The blocks that each new token read, beside an answer: what sparse attention looked at while it was written."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from m3jax.serve.gateway.answers import Ask, token_text
from m3jax.serve.gateway.gateway import Gateway
from m3jax.text import Tokenizer


def blocks_of(gateway: Gateway, ask: Ask, index: int) -> dict[str, Any]:
    """Return the field of an answer that says which blocks its tokens read; {} where it was not asked for.

    Args:
      gateway: that serves.
      ask: of the request, whose worker has noted what it recorded.
      index: of the answer.
    """
    if ask.notes is None:
        return {}
    result, prompt = ask.notes[index], ask.request.tokenized.input_ids
    record, size = result.records["blocks"], gateway.model.block_size
    return {"blocks": described_blocks(record, prompt, result.tokens, size, ask.tokenizer)}


def described_blocks(
    record: Int[np.ndarray, "X L K J"], prompt: Sequence[int], tokens: Sequence[int], block: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return a record of blocks as JSON.

    Args:
      record: of X new tokens, the J blocks that each of K key heads of the L sparse layers selected; -1 is none.
      prompt: token ids.
      tokens: the new ones.
      block: tokens of a block.
      tokenizer: of the model.

    Returns:
      `block_size`; `choices`, the L K selections that a token makes; `texts`, the text of each block of prompt and
      answer; `tokens`, for each new one its `text` and the blocks that were read to draw it, as [block, how many of
      the selections have it].
    """
    num_tokens, num_layers, num_heads = record.shape[:3]
    read = []
    for token, chosen in zip(tokens, record.reshape(num_tokens, -1), strict=False):
        found, counts = np.unique(chosen[chosen >= 0], return_counts=True)
        read.append({"text": token_text(tokenizer, token)[0], "blocks": np.stack([found, counts], -1).tolist()})
    whole = [*prompt, *tokens]
    texts = [
        tokenizer.decode(whole[start : start + block], skip_special_tokens=False)
        for start in range(0, len(whole), block)
    ]
    return {"block_size": block, "choices": num_layers * num_heads, "texts": texts, "tokens": read}
