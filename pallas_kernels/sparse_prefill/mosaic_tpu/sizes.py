"""Static sizes that both TPU schedules of sparse prefill share."""

import dataclasses

from pallas_kernels.backends import TileConfig
from pallas_kernels.pages import Pages


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a step."""

    tokens: int = 16  # queries of a step


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call."""

    k: Pages
    tokens: int
    length: int
    heads: int
    kv_heads: int
    slots: int
    width: int

    @property
    def group(self) -> int:
        """G, query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def lanes(self) -> int:
        """Lanes of a step: its tokens x G."""
        return self.tokens * self.group

    @property
    def tiles(self) -> int:
        """Tiles of tokens that cover a row's."""
        return -(-self.length // self.tokens)

    @property
    def block_size(self) -> int:
        """P, tokens of a block."""
        return self.k.block_size
