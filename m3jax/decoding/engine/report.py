"""Reports of an engine's work so far: its seconds, a draft's proposals, the pool beside host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m3jax.cache import HostMemory
from m3jax.cache.device_pages import StackCache
from m3jax.cache.offload.pool import OffloadedStack
from m3jax.decoding.speculation.verify import DraftCounts


@dataclass
class Timings:
    """The seconds that an engine spent, by kind of work, and the tokens of each kind.

    Attributes:
      compile_seconds: tracing and compiling, in no other number here; about 0 for a shape met before.
      prefill_seconds: the prompts, up to and with each one's first new token.
      decode_seconds: the new tokens after the first.
      prompt_tokens: that went through the model; those found in the prefix cache did not.
      decoded_tokens: new tokens of all rows after each one's first.
    """

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    decoded_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens a second, all rows together; None before prefill."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """New tokens a second after the first, all rows together; None where there are none."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens else None


@dataclass
class Drafting:
    """Counters of a draft's proposals, and of those that the target accepted.

    Attributes:
      draft_tokens: K, proposals of a round; 0 without a drafter.
      forwards: calls of the target that verified proposals, counted for each row that took part.
      accepted: of these, those in which the first proposal was accepted, the first two, and so on up to K.
    """

    draft_tokens: int
    forwards: int = 0
    accepted: tuple[int, ...] = ()

    def add(self, counts: DraftCounts) -> None:
        """Add the counts of one more device call."""
        self.forwards += int(np.sum(counts.forwards))
        accepted = self.accepted or (0,) * self.draft_tokens
        of_all_rows = np.sum(counts.accepted, axis=0)  # [K]
        self.accepted = tuple(total + int(new) for total, new in zip(accepted, of_all_rows, strict=True))

    @property
    def acceptance(self) -> tuple[float, ...] | None:
        """Share of the target's calls that accepted the first proposal, the first two, and so on; None before any."""
        return tuple(count / self.forwards for count in self.accepted) if self.forwards else None

    @property
    def mean_length(self) -> float | None:
        """Tokens of one verification, the target's own one counted, were no row to end; None before any."""
        return 1 + sum(self.acceptance) if self.forwards else None


def offload_counters(host: HostMemory, stacks: Sequence[StackCache | OffloadedStack]) -> dict[str, int | float]:
    """Return `Engine.offload`'s counters, of a cache whose keys and values are in host memory."""
    offloaded = [stack for stack, pages in zip(stacks, host.pages, strict=True) if pages is not None]
    total = lambda name: int(sum(np.asarray(getattr(stack, name), np.int64).sum() for stack in offloaded))
    hits, misses = total("hits"), total("misses")
    return dict(
        hits=hits,
        misses=misses,
        hit_rate=hits / max(1, hits + misses),
        bytes_in=total("moved") * host.page_bytes,
        bytes_out=host.bytes_out,
        device_bytes=sum(stack.k.nbytes + stack.v.nbytes for stack in offloaded),
        host_bytes=host.nbytes,
    )
