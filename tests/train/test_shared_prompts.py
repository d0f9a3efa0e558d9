"""A prompt that stands once before its answers, against the sequences alone."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from support import tiny

from m3jax.model import M3, Choices
from m3jax.msa import SelectionRules, block_scores, select_blocks
from m3jax.ops import Heads
from m3jax.parallel import make_mesh
from m3jax.train.grpo import RunSettings, layout_of_groups
from m3jax.train.policy import PolicyLoss
from m3jax.train.rollouts import Episode, RolloutLoss, as_batch, as_batch_of_groups, read_batch
from m3jax.train.shared_prompts import GroupLayout, MakeGroupPages

# Blocks of 4 of which a query keeps 3; the first layer attends to all.
CONFIG = tiny.config("dM", index_block_size=4)
BLOCK, KEPT, LENGTH, NEW = 4, 3, 40, 13
PROMPTS = (23, 5, 16)  # three tokens, one, and a whole block are left; five blocks, one and three are shared
RECORDS = ("expert_ids", "blocks")


@cache
def model() -> M3:
    return tiny.model(CONFIG)


def episode(prompt: np.ndarray, draw: np.random.Generator, new: int) -> Episode:
    """Random tokens with a record of random choices; a tool wrote the second but last token of a long answer."""
    count, length = len(prompt), len(prompt) + new
    is_drawn = np.arange(length) >= count
    if new > 5:
        is_drawn[-2] = False
    has_record = np.append(is_drawn[1:], False)
    ids = np.stack([draw.permutation(CONFIG.num_local_experts)[:2] for _ in range(length)])
    blocks = np.full((length, CONFIG.num_key_value_heads, KEPT), -1)
    for position, own in enumerate(np.arange(length) // BLOCK):
        for head in range(CONFIG.num_key_value_heads):
            kept = [*np.sort(draw.permutation(own)[: KEPT - 1]), own]
            blocks[position, head, : len(kept)] = kept
    choices = Choices(
        expert_ids=np.where(has_record[:, None], ids, -1)[None, :, None].astype(np.int32),
        blocks=np.where(has_record[:, None, None], blocks, -1)[None, :, None].astype(np.int32),
    )
    tokens = tuple(int(token) for token in (*prompt, *draw.integers(0, CONFIG.vocab_size, new)))
    logprobs = np.where(is_drawn, -draw.random(length) * 4, 0).astype(np.float32)
    support = np.where(is_drawn[:, None], draw.integers(0, 2**30, (length, 2)), -1).astype(np.int32)
    return Episode(tokens, is_drawn, logprobs, choices, support)


@cache
def groups(answers: int) -> tuple[tuple[Episode, ...], ...]:
    draw = np.random.default_rng(answers)
    prompts = [draw.integers(0, CONFIG.vocab_size, length) for length in PROMPTS]
    return tuple(
        tuple(episode(prompt, draw, int(draw.integers(1, NEW + 1))) for _ in range(answers)) for prompt in prompts
    )


def batches(answers: int, replay: tuple[str, ...]) -> tuple[dict, dict]:
    """Return the batch of the sequences alone, and that of groups."""
    drawn, layout = groups(answers), GroupLayout.of(PROMPTS, NEW, BLOCK)
    alone = as_batch([one for group in drawn for one in group], LENGTH, replay)
    shared = as_batch_of_groups(drawn, layout, replay)
    advantages = np.random.default_rng(1).normal(size=len(alone["tokens"])).astype(np.float32)
    of_loss = lambda batch: batch | {"advantages": advantages, "old": batch["sampler"], "reference": batch["sampler"]}
    return of_loss(alone), of_loss(shared)


def drawn_only(values: np.ndarray, batch: dict) -> np.ndarray:
    return np.asarray(values)[batch["mask"]]


@pytest.mark.parametrize(
    ("answers", "replay", "data"),
    [(3, (), 1), (2, (*RECORDS, "support"), 1), pytest.param(3, (), 3, marks=pytest.mark.further)],
    ids=["live", "replayed", "mesh"],
)
def test_losses_and_gradients_are_those_of_the_sequences_alone(answers, replay, data):
    """T29, T30, T58: prompts of all remainders, padding, a tool's token; with replay activations are recomputed too."""
    alone, shared = batches(answers, replay)
    assert shared["prompts"].shape == (3, 20) and shared["tokens"].shape == (3 * answers, 20)
    loss_fn = RolloutLoss(PolicyLoss(mean="sequence", level="sequence", kl_weight=0.1), remat=bool(replay))
    step = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    reader = model()
    if data > 1:
        reader = tiny.model(CONFIG, mesh=make_mesh(data=data))
        of_rows = lambda x: NamedSharding(reader.mesh, PartitionSpec(*("data",)[: np.ndim(x)]))
        shared = jax.tree.map(lambda x: jax.device_put(x, of_rows(x)), shared)
    (loss, parts), grads = step(reader, shared)
    (want, want_parts), want_grads = step(model(), alone)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    logprobs, expected = drawn_only(parts["logprobs"], shared), drawn_only(want_parts["logprobs"], alone)
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


def test_an_answer_keeps_the_blocks_of_its_sequence_alone():
    """Scores are small whole numbers, so that most of them tie: the order of ties is that of the sequence's blocks."""
    answers, layout = 3, GroupLayout.of(PROMPTS, NEW, BLOCK)
    batch, draw = as_batch_of_groups(groups(answers), layout), np.random.default_rng(0)
    rules, heads, width = SelectionRules(top_k=KEPT), 2, 3
    slots = layout.prompt_slots
    index_q, index_k = (draw.integers(-1, 2, (3, layout.tokens(answers), *more, width)) for more in ((heads,), ()))
    first = batch["positions"].reshape(3, answers, -1)[:, 0, :1]
    of_prompts = np.maximum(np.arange(slots) - slots + first, -1)
    positions = np.concatenate([of_prompts, batch["positions"].reshape(3, -1)], axis=1).astype(np.int32)
    pages = MakeGroupPages(slots, answers)(block_size=BLOCK).replace(heads=Heads(index_k=jnp.float32(index_k)))
    call = SimpleNamespace(positions=jnp.asarray(positions))
    found = np.asarray(jax.jit(lambda q: pages.select(call, q, rules))(jnp.float32(index_q)))

    to_length = lambda x: np.pad(x, [(0, LENGTH - len(x)), *[(0, 0)] * (x.ndim - 1)])
    queries, keys, found_rows, lengths = [], [], [], []
    for group in range(3):
        for answer in range(answers):
            columns = np.r_[:slots, slots + answer * layout.width : slots + (answer + 1) * layout.width]
            columns = columns[positions[group, columns] >= 0]
            np.testing.assert_array_equal(positions[group, columns], np.arange(len(columns)))
            queries.append(to_length(index_q[group, columns]))
            keys.append(to_length(index_k[group, columns]))
            found_rows.append(to_length(found[group].swapaxes(0, 1)[columns] + 1) - 1)  # -1 behind the sequence
            lengths.append(len(columns))

    @jax.jit
    def alone(index_q, index_k, lengths):
        places = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), index_q.shape[:2])
        scores = block_scores(index_q, index_k, places, lengths, BLOCK)
        return select_blocks(scores, places, lengths, rules, block_size=BLOCK)

    expected = alone(jnp.float32(queries), jnp.float32(keys), jnp.int32(lengths))
    np.testing.assert_array_equal(np.stack(found_rows).swapaxes(1, 2), expected)


def test_where_prompts_are_shared():
    """A layout has room for every prompt, and is left out where it could not be right or would spare nothing."""
    settings, chosen = RunSettings(steps=1, prompts=2, answers=3), GroupLayout.of(PROMPTS, NEW, BLOCK)
    assert chosen == GroupLayout(20, 20, BLOCK) and chosen.tokens(3) == 80
    of_run = lambda settings, model, lengths=PROMPTS, length=LENGTH: layout_of_groups(
        lengths, NEW, length, settings, model
    )
    assert of_run(settings, model()) == chosen
    assert of_run(replace(settings, invariant=True), model()) is None
    assert of_run(settings, model(), (4, 1)) is None  # no prompt has a whole block before its last token
    # One block is shared by the answers to one prompt, and four tokens of the other are repeated in all rows.
    assert of_run(replace(settings, answers=2), model(), (5, 4), length=20) is None
    assert of_run(settings, model(), (9, 8), length=24) == GroupLayout(8, 20, BLOCK)
    assert of_run(settings, tiny.model(CONFIG, mesh=make_mesh(data=2))) == chosen
    assert of_run(settings, tiny.model(CONFIG, mesh=make_mesh(data=3))) is None


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 5))
def test_the_layout_of_groups_is_the_least_that_holds_all(lengths, new, block):
    """Of whole blocks; a prompt's last token is an answer's."""
    layout = GroupLayout.of(lengths, new, block)
    shared = [max(n for n in range(0, length, block) if n <= length - 1) for length in lengths]
    own = max(length - of_it for length, of_it in zip(lengths, shared, strict=True)) + new
    assert layout.prompt_slots == max(shared) and layout.block_size == block
    assert layout.width % block == 0 and own <= layout.width < own + block


def test_what_cannot_be_shared_is_said(unchecked):
    drawn, layout = groups(2), GroupLayout.of(PROMPTS, NEW, BLOCK)
    for episodes, room, message in (
        ((drawn[0], drawn[1][:1]), layout, r"groups of \[1, 2\] episodes: all need as many"),
        (((drawn[0][0], groups(3)[0][0]),), layout, "group 0 begin with different prompts"),
        (drawn, replace(layout, prompt_slots=16), "group 0 shares 20 tokens .* room for 16 and 20"),
        (drawn, replace(layout, width=4), "more; the layout has room for 20 and 4"),
    ):
        with pytest.raises(ValueError, match=message):
            as_batch_of_groups(episodes, room)
    shared = as_batch_of_groups(drawn, layout)
    with pytest.raises(ValueError, match="not shared in the invariant mode"):
        read_batch(model().with_invariance(), shared)
    with pytest.raises(ValueError, match="5 answers to 3 prompts"):
        read_batch(model(), {name: x[:5] for name, x in shared.items()})
    with pytest.raises(ValueError, match="no prompt has a whole block"):
        read_batch(model(), shared | {"prompts": shared["prompts"][:, :0]})
