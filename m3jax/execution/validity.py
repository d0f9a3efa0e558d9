"""The rules for a token's experts and blocks, whether a layer, an edit or a record chose them."""

import numpy as np
from jaxtyping import Bool, Int


def is_token(positions: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, " B"]) -> Bool[np.ndarray, "B T"]:
    """Return True for tokens and False for padding, whose choices mean nothing."""
    return (positions >= 0) & (positions < lengths[:, None])


def are_blocks(blocks: Int[np.ndarray, "*X J"], own_block: Int[np.ndarray, "..."]) -> Bool[np.ndarray, "*X"]:
    """Return True where ids ascend, end with the token's own block, and are followed by -1 alone.

    Args:
      blocks: Selected ids of each query.
      own_block: Own block of each query; broadcasts against X.
    """
    count = (blocks >= 0).sum(-1, keepdims=True)
    last = np.take_along_axis(blocks, np.maximum(count - 1, 0), axis=-1)[..., 0]
    ascends = (blocks[..., 1:] > blocks[..., :-1]) | (blocks[..., 1:] == -1)
    is_padded = (blocks >= 0) == (np.arange(blocks.shape[-1]) < count)
    return ascends.all(-1) & is_padded.all(-1) & (last == own_block)


def are_experts(expert_ids: Int[np.ndarray, "*X A"], num_experts: int) -> Bool[np.ndarray, "*X"]:
    """Return True where ids are distinct and the model has them all.

    Args:
      expert_ids: Experts of each token, in any order.
      num_experts: Number of experts of a layer.
    """
    in_order = np.sort(expert_ids, axis=-1)
    is_distinct = (in_order[..., 1:] != in_order[..., :-1]).all(-1)
    return is_distinct & ((expert_ids >= 0) & (expert_ids < num_experts)).all(-1)
