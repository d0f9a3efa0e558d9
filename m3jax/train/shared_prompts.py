"""Groups of answers in which the prompt stands once: each answer is computed as if it followed a prompt of its own.

A row of a call holds one group. In front are the *whole blocks* of its prompt that end before the prompt's last token,
pushed to the right so that they end where the answers begin; then, for each answer, what is left of the prompt, at most
P tokens, and the answer. What is left is computed again for each answer: its last block goes on with the answer's
tokens, whose index keys decide that block's score, so that this block is another one behind every answer. A block that
the prompt fills is the same behind all of them, and no token of the prompt sees an answer.

    | padding, whole blocks | left of the prompt, answer 0, padding | left of the prompt, answer 1, padding | ...
      prompt_slots            width                                   width

An answer's queries have the keys of the prompt in front of their own and none of the other answers': that is a packed
row (`m3jax.train.packing`) of one document, of which the last `width` tokens are computed. The definition is
`m3jax.train.losses.token_logprobs` of the sequences alone. Positions, blocks and given choices are those of the
sequence. The invariant mode gives a token the engine's bits by an order of sums that this does not keep: it computes
sequences alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from einops import rearrange, repeat
from flax import struct
from jaxtyping import Array, Float, Int, Shaped

from m3jax.cache import CallPages
from m3jax.execution import Remat
from m3jax.model import M3, Choices
from m3jax.train.losses import logprobs_of_hidden
from m3jax.train.packing import (
    attend_to_blocks,
    attend_to_documents,
    in_row,
    select_in_documents,
    with_fast_gradients,
)


@dataclass(frozen=True)
class GroupLayout:
    """The places of a group in its row, the same for all groups of a run.

    Attributes:
      prompt_slots: S, tokens of the longest shared part of a prompt, a multiple of P.
      width: W, tokens of the longest answer and of what is left of its prompt, a multiple of P.
      block_size: P.
    """

    prompt_slots: int
    width: int
    block_size: int

    @classmethod
    def of(cls, prompt_lengths: Sequence[int], new_tokens: int, block_size: int) -> "GroupLayout":
        """Return the smallest layout of some prompts.

        Args:
          prompt_lengths: tokens of each.
          new_tokens: that may follow a prompt.
          block_size: P.
        """
        shared = [shared_tokens(length, block_size) for length in prompt_lengths]
        longest = new_tokens + max(length - of_it for length, of_it in zip(prompt_lengths, shared, strict=True))
        return cls(max(shared), -(-longest // block_size) * block_size, block_size)

    def tokens(self, answers: int) -> int:
        """Return the tokens of a row that holds so many answers."""
        return self.prompt_slots + answers * self.width


def shared_tokens(prompt_length: int, block_size: int) -> int:
    """Return how many of a prompt's tokens the answers share: its whole blocks, without the last token.

    That one reads the distribution of an answer's first token, and has its record.
    """
    return (prompt_length - 1) // block_size * block_size


@struct.dataclass
class GroupPages(CallPages):
    """The keys of a call whose rows hold a prompt and its answers: an answer sees the prompt and itself.

    The call's positions are those in the sequences, -1 for what is no token. Selected blocks are blocks of the
    sequence, as recorded ones are.
    """

    read_by_kernels: ClassVar[bool] = False
    prompt_slots: int = struct.field(pytree_node=False, default=0)
    answers: int = struct.field(pytree_node=False, default=1)

    def select(self, call, index_q, rules):
        """Return the blocks that each query keeps of its sequence."""

        def select(index_q, index_k, positions):
            blocks = select_in_documents(index_q, index_k, positions, rules, self.block_size)
            return blocks.swapaxes(1, 2)  # [_ T K J]

        parts = self._apart(index_q), self._seen(self.heads.index_k), self._apart(call.positions)
        return self._joined(*map(select, *parts)).swapaxes(1, 2)  # [G K X J]

    def attend_selected(self, call, q, blocks):
        """Return attention over the selected blocks, and this object."""

        def attend(q, k, v, positions, blocks):
            blocks = in_row(blocks.swapaxes(1, 2), positions, k.shape[1], self.block_size)
            return attend_to_blocks(q, k, v, positions, blocks, self.block_size)

        keys_and_values = self._seen(self.heads.k), self._seen(self.heads.v)
        parts = self._apart(q), *keys_and_values, self._apart(call.positions), self._apart(blocks.swapaxes(1, 2))
        return self._joined(*map(attend, *parts)), self

    def attend_all(self, call, q):
        """Return attention over all of each query's sequence, and this object."""
        parts = self._apart(q), self._seen(self.heads.k), self._seen(self.heads.v), self._apart(call.positions)
        return self._joined(*map(attend_to_documents, *parts)), self

    def _apart(self, x: Shaped[Array, "G X ..."]) -> tuple[Shaped[Array, "G S ..."], Shaped[Array, "B W ..."]]:
        """Return what the tokens of the prompts have, and, a row each, what those of the answers have."""
        of_prompts, of_answers = x[:, : self.prompt_slots], x[:, self.prompt_slots :]
        return of_prompts, rearrange(of_answers, "g (n w) ... -> (g n) w ...", n=self.answers)

    def _seen(self, x: Float[Array, "G X ..."]) -> tuple[Float[Array, "G S ..."], Float[Array, "B Y ..."]]:
        """Return the keys that the prompts' queries see, and those that the answers' do, Y = S + W of them."""
        of_prompts, of_answers = self._apart(x)
        in_front = repeat(of_prompts, "g s ... -> (g n) s ...", n=self.answers)
        return of_prompts, jnp.concatenate([in_front, of_answers], axis=1)

    def _joined(
        self, of_prompts: Shaped[Array, "G S ..."], of_answers: Shaped[Array, "B W ..."]
    ) -> Shaped[Array, "G X ..."]:
        """Undo `_apart`."""
        of_answers = rearrange(of_answers, "(g n) w ... -> g (n w) ...", n=self.answers)
        return jnp.concatenate([of_prompts, of_answers], axis=1)


@dataclass(frozen=True)
class MakeGroupPages:
    """A maker of `GroupPages`; two of the same sizes are equal, as models that compute alike have to be."""

    prompt_slots: int
    answers: int

    def __call__(self, block_size: int) -> GroupPages:
        """Return pages without keys."""
        return GroupPages(block_size=block_size, prompt_slots=self.prompt_slots, answers=self.answers)


def answer_logprobs(
    model: M3,
    prompts: Int[Array, "G S"],
    tokens: Int[Array, "B W"],
    positions: Int[Array, "B W"],
    choices: Choices | None = None,
    remat: Remat = False,
    support: Int[Array, "B W-1 V"] | None = None,
    temperature: float | None = None,
) -> Float[Array, "B W-1"]:
    """Return the log-probability of each token of some answers but the first; it has gradients.

    They are those that `token_logprobs` has for the sequences alone, with gradients of the prompts' tokens summed over
    their answers.

    Args:
      model: the target, not in its invariant mode.
      prompts: the shared part of each prompt, at the end of its row; what stands before it means nothing.
      tokens: what is left of the prompt and the answer, right-padded; B / G rows in turn continue one prompt.
      positions: of these tokens in their sequences, -1 for padding; the first one says how long the shared part is.
      choices: as in `token_logprobs`, of `tokens`: [B W ...]. The prompts' tokens choose for themselves.
      remat, support, temperature: as in `token_logprobs`.

    Raises:
      ValueError: a model in its invariant mode, or rows that the prompts do not divide.
    """
    (num_prompts, prompt_slots), batch = prompts.shape, len(tokens)
    if model.compute.invariant:
        raise ValueError("prompts are not shared in the invariant mode, whose bits are those of sequences alone: "
                         "use token_logprobs")  # fmt: skip
    if batch % num_prompts:
        raise ValueError(f"{batch} answers to {num_prompts} prompts: give each prompt as many answers")
    if not prompt_slots:
        raise ValueError("no prompt has a whole block, so that nothing is shared: use token_logprobs")
    answers = batch // num_prompts
    of_rows = lambda x: rearrange(x, "(g n) w ... -> g (n w) ...", n=answers)
    shared = positions[::answers, :1]  # [G 1], tokens of the shared part
    prompt_positions = jnp.arange(prompt_slots, dtype=jnp.int32) - prompt_slots + shared  # [G S]
    all_positions = jnp.concatenate([jnp.maximum(prompt_positions, -1), of_rows(positions)], axis=1)
    if choices is not None:
        choices = Choices(**{
            name: jnp.pad(
                of_rows(jnp.asarray(given)), ((0, 0), (prompt_slots, 0), *[(0, 0)] * (given.ndim - 2)),
                constant_values=-1,
            )
            for name, given in (("expert_ids", choices.expert_ids), ("blocks", choices.blocks))
            if given is not None
        })  # fmt: skip
    model = with_fast_gradients(model, MakeGroupPages(prompt_slots, answers))
    out = model.run(
        jnp.concatenate([prompts, of_rows(tokens)], axis=1),
        positions=all_positions,
        lengths=jnp.max(all_positions, axis=1) + 1,
        choices=choices,
        remat=remat,
        logits=False,
    )
    hidden = rearrange(out.hidden[:, prompt_slots:], "g (n w) d -> (g n) w d", n=answers)
    return logprobs_of_hidden(model, hidden, tokens, support, temperature)
