"""The named shapes that drive tests, tuning and benchmarks: M3's attention, whole and as one of four shards."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of one sparse layer: the last `queries` tokens of rows of `context` tokens."""

    name: str
    batch: int
    queries: int
    context: int
    heads: int = 64
    kv_heads: int = 4
    width: int = 128
    block_size: int = 128
    top_k: int = 16

    @property
    def blocks(self) -> int:
        """M, blocks of a row."""
        return -(-self.context // self.block_size)

    @property
    def index_flops(self) -> float:
        """Multiplications and additions of the index scores that any method needs."""
        first = self.context - self.queries
        seen = self.queries * first + self.queries * (self.queries + 1) / 2
        return 2.0 * self.batch * self.width * self.kv_heads * seen

    @property
    def attention_flops(self) -> float:
        """Multiplications and additions of attention over the selected blocks, each counted whole."""
        keys = min(self.top_k, self.blocks) * self.block_size
        return 4.0 * self.batch * self.heads * self.width * self.queries * keys

    @property
    def dense_flops(self) -> float:
        """Multiplications and additions of dense causal attention."""
        return 2.0 * self.index_flops * self.heads / self.kv_heads

    @property
    def index_bytes(self) -> float:
        """Bytes of the index keys in bfloat16, read once."""
        return 2.0 * self.batch * self.context * self.width

    @property
    def selected_bytes(self) -> float:
        """Bytes of the keys and values in bfloat16 of the blocks that one query a row selects."""
        return 4.0 * self.batch * self.kv_heads * min(self.top_k, self.blocks) * self.block_size * self.width

    @property
    def dense_bytes(self) -> float:
        """Bytes of all keys and values in bfloat16, read once."""
        return 4.0 * self.batch * self.kv_heads * self.context * self.width


PREFILL = (
    Shape("prefill 8,192", 1, 8192, 8192),
    Shape("prefill 32,768", 1, 32768, 32768),
    Shape("prefill 65,536", 1, 65536, 65536),
    Shape("prefill 131,072", 1, 131072, 131072),
    Shape("chunk 8,192 at 1,048,576", 1, 8192, 1048576),
    Shape("chunk 256 at 131,072", 1, 256, 131072),
    Shape("shard of 4, prefill 32,768", 1, 32768, 32768, heads=16, kv_heads=1),
)
DECODE = (
    Shape("decode 1 at 131,072", 1, 1, 131072),
    Shape("decode 1 at 1,048,576", 1, 1, 1048576),
    Shape("decode 8 at 131,072", 8, 1, 131072),
    Shape("decode 32 at 131,072", 32, 1, 131072),
    Shape("verify 8 x 4 at 131,072", 8, 4, 131072),
    Shape("shard of 4, decode 32 at 131,072", 32, 1, 131072, heads=16, kv_heads=1),
)
