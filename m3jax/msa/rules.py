"""The rules of selection, and what the arrays of a call must satisfy: checked here, once."""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

SCORES = ("max", "lse")


@dataclass(frozen=True)
class SelectionRules:
    """How many blocks a query keeps, which of them in any case, and what a block's score is.

    Attributes:
      top_k: J, how many blocks a query keeps at most, forced ones included.
      local_blocks: how many blocks, ending with the query's own, are always kept; at least 1.
      init_blocks: how many blocks at the start of the row are always kept.
      score: how token scores become a block's: "max", or "lse", the log of the sum of exponentials of the scores
        times H**-0.5.

    Raises:
      ValueError: counts that contradict each other, or an unknown score.

    Source: paper section 3 (max, 16 blocks, the own one forced); SGLang for init_blocks, more local_blocks and "lse".
    """

    top_k: int
    local_blocks: int = 1
    init_blocks: int = 0
    score: str = "max"

    def __post_init__(self):
        check_score(self.score)
        if self.local_blocks < 1 or self.init_blocks < 0 or self.local_blocks + self.init_blocks > self.top_k:
            raise ValueError(
                f"local_blocks = {self.local_blocks}, init_blocks = {self.init_blocks}, top_k = {self.top_k}: need "
                "local_blocks >= 1 (a query always keeps its own block), init_blocks >= 0, and both together at most "
                "top_k"
            )


def check_block_size(block_size: int) -> None:
    """Raise ValueError where a block would hold no token."""
    if block_size < 1:
        raise ValueError(f"block_size = {block_size}: must be at least 1")


def check_heads(q: Float[Array, "B T N H"], num_kv_heads: int, width: int) -> None:
    """Raise ValueError where query heads cannot be divided among KV heads, or differ from them in width."""
    if q.shape[2] % num_kv_heads or q.shape[-1] != width:
        raise ValueError(
            f"q has {q.shape[2]} heads of {q.shape[-1]} and k {num_kv_heads} of {width}: need the same width, "
            "and as many query heads as a multiple of the KV heads"
        )


def check_selection(
    q: Float[Array, "B T N H"], num_kv_heads: int, blocks: Int[Array, "B K T J"], block_size: int
) -> None:
    """Raise ValueError where a selection is not one for each row, KV head and query: none is shared (T1, T19)."""
    check_block_size(block_size)
    batch, num_queries = q.shape[:2]
    if blocks.shape[:3] != (batch, num_kv_heads, num_queries):
        raise ValueError(
            f"blocks has shape {blocks.shape}: must be [{batch} {num_kv_heads} {num_queries} J] for these operands"
        )


def check_index(index_q: Float[Array, "B T K I"], index_k: Float[Array, "B S I2"], block_size: int, score: str) -> None:
    """Raise ValueError where index queries and keys differ in width, blocks hold no token, or a score is unknown."""
    check_score(score)
    check_block_size(block_size)
    if index_q.shape[-1] != index_k.shape[-1]:
        raise ValueError(
            f"index_q has width {index_q.shape[-1]} and index_k {index_k.shape[-1]}: they must be the same"
        )


def check_score(score: str) -> None:
    """Raise ValueError for a score that is none of `SCORES`."""
    if score not in SCORES:
        raise ValueError(f"score = {score!r}: allowed are 'max' and 'lse'")
