"""The receiving side of a transfer: frames in, whole pages out."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from m3jax.decoding.protocols import PageContents
from m3jax.messages import shown
from m3jax.transfer.frames import Frame, TransferError, decode
from m3jax.transfer.identity import check_identity

_NAMES = ("k", "v", "index_k")


class PageReceiver:
    """Pages of one prompt, put together from frames that must come whole and in order (T50).

    A frame has some pages of one layer: keys and values of some heads, and with the first heads the index keys (T16).
    How the sender divides heads over its devices is the sender's: each frame says which heads it has, and they are put
    where this engine has them (T49). At the end every page, layer and head must have come exactly once.

    Args:
      transfer: the name of the transfer, which every frame must have.
      num_tokens: of the prompt that was asked for.
      page_layout: of this engine (`Engine.page_layout`).
      page_size: P.
      identity: of this engine (`transfer_identity`).
      name: of the sender in errors.
      left_out: tokens at the beginning whose pages were not asked for: whole pages.
      scored: tokens whose scores were asked for, those from the prompt's second to the one behind it; () for none.

    Attributes:
      num_bytes: of all frames so far.
      prompt_logprobs: scores that have come, as in `Generation.prompt_logprobs`.
      cached_tokens: of the prompt, those that the sender had in its prefix cache; known at the end.
      is_whole: True once the last frame has come.
    """

    def __init__(
        self,
        transfer: str,
        num_tokens: int,
        page_layout: PyTree[jax.ShapeDtypeStruct],
        page_size: int,
        identity: Mapping[str, Any],
        name: str = "the sender",
        left_out: int = 0,
        scored: Sequence[int] = (),
    ):
        self._transfer, self._num_tokens, self._identity, self._name = transfer, num_tokens, identity, name
        self._next_number = 0
        self._layout = page_layout
        self._num_pages = -(-num_tokens // page_size)
        self._group = page_layout[0][0].shape[1]  # pages of an entry
        # Zeros where no page comes: places of the last entry behind the prompt's last page.
        self._pages: list[PageContents] = [
            [tuple(None if x is None else np.zeros(x.shape, x.dtype) for x in stack) for stack in page_layout]
            for _ in range(-(-self._num_pages // self._group))
        ]
        counted = lambda x: np.zeros((x.shape[0], self._num_pages, x.shape[2]), bool)  # [L pages K]
        self._has_come = [counted(k) for k, _, _ in page_layout]
        for has in self._has_come:
            has[:, : left_out // page_size] = True  # one that came all the same would come twice
        self.num_bytes, self.cached_tokens, self.is_whole = 0, 0, False
        self._scored = scored
        self.prompt_logprobs: list[dict[int, float]] = []

    def take(self, data: bytes) -> str:
        """Take the next frame, and return its kind.

        Raises:
          TransferError: it is damaged, not the next one, of another model, or has pages that cannot be.
        """
        frame, transfer, number = decode(data)
        if transfer != self._transfer:
            raise TransferError(f"{self._name} sent a frame of another transfer")
        if self.is_whole:
            raise TransferError(f"{self._name} sent frame {shown(number)} behind the last one")
        if number != self._next_number:
            raise TransferError(
                f"{self._name} sent frame {shown(number)} where frame {self._next_number} comes next: one was lost, "
                "came twice or came too early"
            )
        if (number == 0) != (frame.kind == "hello"):
            raise TransferError(
                f"{self._name} sent {shown(frame.kind)} as frame {number}: a transfer begins with hello"
            )
        self._next_number += 1
        self.num_bytes += len(data)
        try:
            self._carry_out(frame)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise TransferError(f"{self._name} sent a frame that cannot be carried out: {shown(error)}") from error
        return frame.kind

    def pages(self) -> list[PageContents]:
        """Return the pages, as `Snapshot.pages` has them.

        Raises:
          TransferError: the transfer has not come to its end.
        """
        if not self.is_whole:
            raise TransferError(f"{self._name} ended after frame {self._next_number - 1}, before all pages had come")
        return self._pages

    def _carry_out(self, frame: Frame) -> None:
        if frame.kind == "hello":
            check_identity(frame.fields["identity"], self._identity, self._name)
            if frame.fields["tokens"] != self._num_tokens:
                given = shown(frame.fields["tokens"])
                raise TransferError(f"{self._name} reads {given} tokens, and {self._num_tokens} were asked for")
        elif frame.kind == "pages":
            self._put(frame)
        elif frame.kind == "scores":
            self._note_scores(frame)
        elif frame.kind == "end":
            if missing := sum(int((~has).sum()) for has in self._has_come):
                raise TransferError(f"{self._name} says that all has come, and {missing} parts of pages are missing")
            if missing := len(self._scored) - len(self.prompt_logprobs):
                raise TransferError(f"{self._name} says that all has come, and scores of {missing} tokens are missing")
            self.cached_tokens, self.is_whole = int(frame.fields["cached_tokens"]), True
        elif frame.kind != "alive":
            raise TransferError(f"{self._name} sent a frame of an unknown kind, {shown(frame.kind)}")

    def _note_scores(self, frame: Frame) -> None:
        """Note the scores of the prompt's next tokens, each of which must be among those that its place scores."""
        first, known = frame.fields["first"], len(self.prompt_logprobs)
        counts, ids, logprobs = (frame.arrays[name] for name in ("counts", "ids", "logprobs"))
        if first != known or not 0 < len(counts) <= len(self._scored) - known:
            raise TransferError(
                f"{self._name} sent scores of tokens {shown(first)} to {shown(first + len(counts))}, and of "
                f"{len(self._scored)} those from {known} on come next"
            )
        ends = np.cumsum(counts)
        if counts.min() < 1 or ids.shape != (ends[-1],) or ids.shape != logprobs.shape:
            raise TransferError(f"{self._name} sent scores of {len(counts)} tokens that are not whole")
        if not np.isfinite(logprobs).all():
            raise TransferError(f"{self._name} sent scores that are no numbers (NaN, infinite)")
        for token, start, end in zip(self._scored[known:], ends - counts, ends, strict=False):
            entry = dict(zip(ids[start:end].tolist(), logprobs[start:end].tolist(), strict=True))
            if token not in entry:
                raise TransferError(f"{self._name} sent scores of another prompt: none of token {token} in its place")
            self.prompt_logprobs.append(entry)

    def _put(self, frame: Frame) -> None:
        """Put a frame's pages in their place."""
        stack, layer, first, start = (frame.fields[name] for name in ("stack", "layer", "first", "first_head"))
        if not 0 <= stack < len(self._layout):
            raise TransferError(f"{self._name} sent pages of stack {stack}, and this engine has {len(self._layout)}")
        count, heads = frame.arrays["k"].shape[:2]
        layout, has_come = self._layout[stack], self._has_come[stack]
        in_range = 0 <= layer < has_come.shape[0] and 0 <= first <= first + count <= self._num_pages
        if not (in_range and count and heads and 0 <= start <= start + heads <= has_come.shape[2]):
            raise TransferError(
                f"{self._name} sent pages {first} to {first + count}, heads {start} to {start + heads} of layer "
                f"{layer} of stack {stack}: this engine has no such place"
            )
        wanted = {"k", "v"} | ({"index_k"} if layout[2] is not None and start == 0 else set())
        if frame.arrays.keys() != wanted:
            raise TransferError(
                f"{self._name} sent {', '.join(frame.arrays)} of stack {stack}, and {', '.join(sorted(wanted))} belong "
                "together"
            )
        for name, expected in zip(_NAMES, layout, strict=True):
            if name in wanted:
                array = frame.arrays[name]
                shape = (count, *((heads,) if name != "index_k" else ()), *expected.shape[-2:])
                if (array.shape, array.dtype) != (shape, expected.dtype):
                    raise TransferError(
                        f"{self._name} sent {name} as {array.dtype} {list(array.shape)}, and this engine has "
                        f"{expected.dtype} {list(shape)}"
                    )
        if has_come[layer, first : first + count, start : start + heads].any():
            raise TransferError(f"{self._name} sent pages {first} to {first + count} of layer {layer} twice")
        has_come[layer, first : first + count, start : start + heads] = True
        for index in range(count):
            group, place = divmod(first + index, self._group)
            k, v, index_k = self._pages[group][stack]
            k[layer, place, start : start + heads] = frame.arrays["k"][index]
            v[layer, place, start : start + heads] = frame.arrays["v"][index]
            if "index_k" in wanted:
                index_k[layer, place] = frame.arrays["index_k"][index]
