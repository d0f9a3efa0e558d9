"""The sizes that decide which programs an engine compiles."""

from dataclasses import dataclass

from m3jax.platform import platform

# Tokens of a prompt in one device call, by platform: the default sizes. A GPU takes less than three times as long for
# 8,192 as for 2,048 (docs/performance.md), a CPU no less a token for 2,048 than for 512 (docs/notes/performance.md).
PREFILL_CHUNKS = {"cpu": (256, 512), "tpu": (256, 2048), "gpu": (256, 2048, 8192)}
DRAFT_TOKENS = 3  # proposals of a round, by default


def prefill_chunks(longest: int) -> tuple[int, ...]:
    """Return the default sizes of a prefill call on this platform, ascending; none is larger than `longest`.

    Args:
      longest: tokens that a prompt can have.
    """
    sizes = PREFILL_CHUNKS[platform()]
    return (*(size for size in sizes[:-1] if size < longest), min(sizes[-1], longest))


@dataclass(frozen=True)
class Shapes:
    """The sizes that decide which programs are compiled.

    Attributes:
      batch: rows that decode together.
      decode_rows: rows of the decode calls that compute fewer, ascending; the largest call has all.
      prompts: prompts that share a prefill call.
      chunks: tokens of each in one call: the sizes that there are, ascending.
      steps: decode steps of one call, at most.
      stop_ids: of one row, at most.
      biases: tokens of one row that have a bias, at most.
      bad_words: of one row, at most.
      top_logprobs: most probable tokens that a row can ask for with each new one.
      records: names of choices for whose recording programs are compiled ahead.
      edits: names of the values that requests can change.
      prompt_logprobs: whether programs that score prompts are compiled ahead.
      draft_tokens: K, proposals of a round; 0 without a drafter.
      media_patches: of one call of the tower: the sizes that there are, ascending; () where only text is served.
      media_tokens: F, features of images and videos that the device keeps.
    """

    batch: int
    prompts: int
    chunks: tuple[int, ...]
    steps: int
    stop_ids: int
    decode_rows: tuple[int, ...] = ()
    biases: int = 0
    bad_words: int = 0
    top_logprobs: int = 0
    records: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    draft_tokens: int = 0
    media_patches: tuple[int, ...] = ()
    media_tokens: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of a row in one call, at most; a step is a round where there is a drafter."""
        return self.steps * (1 + self.draft_tokens)

    def tower_size(self, patches: int) -> int:
        """Return the patches of the smallest call of the tower that holds so many."""
        return next(size for size in self.media_patches if size >= patches)

    def decode_size(self, rows: int) -> int:
        """Return the rows of the smallest decode call that holds so many."""
        return next((size for size in self.decode_rows if size >= rows), self.batch)

    def prefill_size(self, tokens: int) -> int:
        """Return the width of the next prefill call for so many tokens: the smallest that holds them, or the largest.

        Where two smaller calls hold them too and compute less, the width is that of the first of the two.
        """
        holds_all = next((width for width in self.chunks if width >= tokens), self.chunks[-1])
        holds_half = next((width for width in self.chunks if 2 * width >= tokens), holds_all)
        return holds_half if 2 * holds_half < holds_all else holds_all

    def prefill_sizes(self, tokens: int | None) -> tuple[int, ...]:
        """Return the sizes of the calls in which so many tokens of a prompt go through prefill; all sizes for None."""
        if tokens is None:
            return self.chunks
        sizes = set()
        while tokens > 0:
            sizes.add(size := self.prefill_size(tokens))
            tokens -= size
        return tuple(sorted(sizes))
