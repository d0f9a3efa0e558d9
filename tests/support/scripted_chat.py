"""A model that answers what a script says, turn by turn, so that a chat is tested with the real engine and its cache.

As a program it is `python -m m3jax.chat` with such a model: `python scripted_chat.py SCRIPT.json ARGUMENTS`; the script
is a list of answers as the model writes them. SECONDS_A_STEP in the environment makes it slow.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.embedded import TOKENIZER
from support.fake_model import FakeCache, FakeConfig

from m3jax.media import MERGE

NS = "]<]minimax[>["
TURNS, TOKENS = 4, 512
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key in keys}, "required": keys},
        },
    }
    for name, kind, keys in (("lookup", "string", ["key"]), ("add", "integer", ["a", "b"]))
]


def wire(*calls: tuple[str, dict]) -> str:
    """A block of calls with plain arguments, as the model writes it."""
    inner = ""
    for name, arguments in calls:
        members = "".join(f"{NS}<{key}>{value}{NS}</{key}>" for key, value in arguments.items())
        inner += f'{NS}<invoke name="{name}">{members}{NS}</invoke>\n'
    return f"{NS}<tool_call>\n{inner}{NS}</tool_call>"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScriptedModel:
    """The token after each is that of the script: row `turn` of a table, from where the assistant begins to write.

    Attributes:
      table: [TURNS, TOKENS] ids; a row ends with the end of the turn. One shape for all, which share programs.
      opening: [2] ids that open an assistant's turn.
      header: how many tokens of that turn the prompt has.
    """

    table: jax.Array
    opening: jax.Array
    header: jax.Array
    config: FakeConfig = field(default=FakeConfig(vocab_size=2048), metadata={"static": True})
    mesh: None = field(default=None, metadata={"static": True})

    @classmethod
    def of(
        cls, answers: Sequence[str | Sequence[int]], thinking_mode: str = "adaptive", **fields: Any
    ) -> "ScriptedModel":
        prefix = {"enabled": "<mm:think>", "disabled": "</mm:think>", "adaptive": ""}[thinking_mode]
        header = TOKENIZER.encode(f"]~b]ai\n{prefix}")
        rows = [TOKENIZER.encode(text) if isinstance(text, str) else list(text) for text in answers]
        table = np.full((TURNS, TOKENS), 1, np.int32)  # 1 ends a turn
        for row, ids in zip(table, rows, strict=False):
            row[: len(ids)] = ids
        return cls(jnp.asarray(table), jnp.array(header[:2], jnp.int32), jnp.int32(len(header)), **fields)

    def with_backend(self, _backend: str) -> "ScriptedModel":
        return self

    def new_cache(self, pages, batch, blocks, **types):
        assert not any(types.values())
        return FakeCache(jnp.zeros((pages, self.config.index_block_size, 1)), jnp.full((batch, blocks), -1, jnp.int32))

    def hidden(self, tokens, cache, positions, lengths):
        valid = (positions >= 0) & (positions < lengths[:, None])
        cache = cache.write(positions, valid, tokens[..., None] + 1.0)
        ids = cache.read(lengths)[..., 0].astype(jnp.int32) - 1  # [B S]
        begins = (ids == self.opening[0]) & (jnp.roll(ids, -1, axis=1) == self.opening[1])
        turn = jnp.cumsum(begins, axis=1) - 1
        begun_at = jax.lax.cummax(jnp.where(begins, jnp.arange(ids.shape[1]), -1), axis=1)
        pick = lambda x: jnp.take_along_axis(x, jnp.clip(positions, 0, ids.shape[1] - 1), axis=1)  # [B T]
        place = jnp.clip(positions - pick(begun_at) - self.header + 1, 0, self.table.shape[1] - 1)
        return self.table[jnp.clip(pick(turn), 0, len(self.table) - 1), place][..., None] * 1.0, cache

    def unembed(self, hidden):
        return 50.0 * jax.nn.one_hot(hidden[..., 0].astype(jnp.int32), self.config.vocab_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScriptedSeer(ScriptedModel):
    """A `ScriptedModel` that takes images and videos, and answers by the script whatever they show."""

    vision: bool = field(default=True, metadata={"static": True})

    def features(self, media):
        return jnp.zeros((len(media.patches) // MERGE**2, 1))

    def embed(self, tokens):
        return tokens[..., None] * 1.0

    def hidden(self, tokens, cache, positions, lengths, embeddings=None):
        return ScriptedModel.hidden(self, tokens, cache, positions, lengths)


def main() -> None:
    """Run the command line with the script's model in the place of a checkpoint's."""
    from m3jax.cli.chat import main as chat
    from m3jax.cli.chat import talk
    from m3jax.console import run_program
    from m3jax.decoding import Engine

    with open(sys.argv.pop(1), encoding="utf-8") as file:
        answers = json.load(file)
    mode = sys.argv[sys.argv.index("--thinking") + 1] if "--thinking" in sys.argv else "adaptive"
    talk.load = lambda *_, **__: ScriptedModel.of(answers, mode)
    step, seconds = Engine.step, float(os.environ.get("SECONDS_A_STEP", "0"))
    Engine.step = lambda engine: (time.sleep(seconds), step(engine))[1]
    run_program(chat)


if __name__ == "__main__":
    main()
