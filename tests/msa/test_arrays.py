"""The checks of MSA's arguments: of shapes and dtypes at every call, of values under `m3jax.checks()`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int
from support.msa_strategies import GROUPED, prefill

import m3jax
from m3jax import msa
from m3jax.msa.checks import checked
from m3jax.msa.share import Share
from m3jax.msa.views import Paged

CASE = prefill(GROUPED)
INDEX_Q, INDEX_K = map(jnp.asarray, CASE.index())
Q, K, V = map(jnp.asarray, CASE.qkv())
POSITIONS, LENGTHS = jnp.asarray(CASE.positions), jnp.asarray(CASE.lengths)
# The latest three blocks of each query: made by numpy, for every test process collects this file.
OWN = np.arange(GROUPED.T) // 4
LATEST = np.maximum(OWN - 2, 0)[:, None] + np.arange(3)
LATEST = np.where(OWN[:, None] >= LATEST, LATEST, -1).astype(np.int32)
BLOCKS = jnp.asarray(np.broadcast_to(LATEST, (GROUPED.B, GROUPED.K, *LATEST.shape)))

CALLS = {
    "block_scores": (partial(msa.block_scores, block_size=4), dict(index_q=INDEX_Q, index_k=INDEX_K)),
    "index_topk": (partial(msa.index_topk, block_size=4, top_k=3), dict(index_q=INDEX_Q, index_k=INDEX_K)),
    "dense_attention": (msa.dense_attention, dict(q=Q, k=K, v=V)),
    "sparse_attention": (partial(msa.sparse_attention, block_size=4), dict(q=Q, k=K, v=V, blocks=BLOCKS)),
}
ROWS = dict(positions=POSITIONS, lengths=LENGTHS)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lengths=LENGTHS[:1]), r"lengths has shape \[1\] .*with B = 3, as (index_)?q has"),
        (dict(lengths=[40, 40, 40]), r"lengths is a list: must be an array of signed integers \[B\]"),
        (dict(lengths=LENGTHS.astype(jnp.uint32)), "lengths has shape .* and dtype uint32: must be signed integers"),
        (dict(positions=POSITIONS[0]), r"positions has shape \[40\] .*: must be signed integers \[B T\]"),
        (dict(positions=POSITIONS.astype(jnp.float32)), "positions .* dtype float32: must be signed integers"),
        (dict(positions=POSITIONS[:, :0]), r"positions has shape \[3, 0\] .*(no axis|with T = 40)"),
    ],
)
def test_rows_that_do_not_fit(name, changes, message):
    """T5, T13: the lengths of one row are not those of three, and positions are whole numbers."""
    call, operands = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(**(operands | ROWS | changes))


def test_a_view_of_keys_and_values_of_two_dtypes():
    """A view has one dtype, as what is stored has."""
    with pytest.raises(ValueError, match="k has dtype float32 and v bfloat16: must have one dtype"):
        msa.contiguous(K, V.astype(jnp.bfloat16), 4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("index_topk", dict(index_q=INDEX_Q[0]), r"index_q has shape \[40, 2, 8\] .*: must be floats \[B T K I\]"),
        ("index_topk", dict(index_q=INDEX_Q[:, :0]), r"index_q .*: no axis of floats \[B T K I\] may be empty"),
        ("index_topk", dict(index_q=INDEX_Q.astype(jnp.int32)), "index_q .* dtype int32: must be floats"),
        ("block_scores", dict(index_k=INDEX_K[:2]), r"index_k has shape \[2, 40, 8\] .* with B = 3, as index_q has"),
        ("sparse_attention", dict(blocks=BLOCKS * 1.0), "blocks .* dtype float32: must be signed integers"),
        ("sparse_attention", dict(v=V[:, :39]), r"v has shape \[3, 39, 2, 8\] .* with S = 40, as k has"),
        ("sparse_attention", dict(k=K.astype(jnp.bfloat16)), "k has dtype bfloat16 and v float32: must have one dtype"),
        ("dense_attention", dict(v=V.astype(jnp.bfloat16)), "k has dtype float32 and v bfloat16: must have one dtype"),
        ("sparse_attention", dict(return_lse="x"), "return_lse = 'x': must be True or False"),
        ("dense_attention", dict(return_lse=1), "return_lse = 1: must be True or False"),
        ("dense_attention", dict(q=None), "q is a NoneType: must be an array of floats"),
    ],
)
def test_operands_of_another_rank_dtype_or_size(name, changes, message):
    call, operands = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(**(operands | ROWS | changes))


# Where the limits of each lie, the tests below have.
WRONG_VALUES = {
    "another block size": (dict(block_size=2), {}, "lacks the query's own block, in blocks of 2"),
    "more keys than there are": ({}, dict(lengths=LENGTHS.at[1].set(41)), r"lengths\[1\] = 41: a row has 0 to 40 keys"),
    "NaN in q": ({}, dict(q=Q.at[1, 2, 0, 3].set(jnp.nan)), r"q\[1, 2, 0, 3\] is NaN, one of 1 in q"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "changes", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_wrong_numbers_are_found_under_checks(options, changes, message):
    """Each changes what is attended to without an error; a compiled function finds it too, and is found as it was."""
    arrays = dict(q=Q, k=K, v=V, blocks=BLOCKS) | ROWS | changes
    attend = partial(msa.sparse_attention, **(dict(block_size=4) | options))
    with m3jax.checks(), pytest.raises(ValueError, match=message):
        attend(**arrays)

    traced = []

    @jax.jit
    def compiled(arrays):
        traced.append(None)
        return attend(**arrays)

    silent = compiled(arrays)
    with pytest.raises(ValueError, match=message), m3jax.checks():
        compiled(arrays)
    np.testing.assert_array_equal(compiled(arrays), silent)
    assert len(traced) == 2  # without checks, and with them


def test_what_is_right_passes_checks():
    """Also inside a program, and where padding holds anything."""
    padded = POSITIONS.at[:, 35:].set(-1), LENGTHS.at[0].set(20)
    run = lambda blocks, *rows: msa.sparse_attention(Q, K, V, blocks, *rows, block_size=4)
    with m3jax.checks():
        args = msa.index_topk(INDEX_Q, INDEX_K, *padded, block_size=4, top_k=3), *padded
        np.testing.assert_allclose(run(*args), jax.jit(run)(*args), rtol=1e-5, atol=1e-6)
        of_padding = Q.at[:, 35:].set(jnp.nan), K.at[0, 20:].set(jnp.nan), V.at[0, 20:].set(jnp.nan)
        out = msa.sparse_attention(*of_padding, *args, block_size=4)
        assert not jnp.any(jnp.isnan(out))
        nobody = jnp.full_like(POSITIONS, -1), LENGTHS
        assert not jnp.any(msa.dense_attention(Q, K, V, *nobody))


def test_an_error_in_a_block_of_checks_names_what_was_found():
    """The error of `checks()` comes first, with the later error as its cause: the finding likely made that one fail."""
    compiled = jax.jit(lambda blocks: msa.sparse_attention(Q, K, V, blocks, POSITIONS, LENGTHS, block_size=4))
    with pytest.raises(ValueError, match="names a block that there is not") as raised, m3jax.checks():
        compiled(BLOCKS + 100)
        raise KeyError("tensor")
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="tensor"), m3jax.checks():
        raise KeyError("tensor")


# Where the limits are: a function of the same arguments that computes nothing.


@checked
def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
):
    """As `msa.dense_attention`."""


@checked
def attend_selected(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
):
    """As `msa.sparse_attention`."""


def ints(*values: object) -> jax.Array:
    return jnp.array(values, jnp.int32)


def found_by(call, *arguments, **options) -> str:
    """What a call says under `checks()`; nothing where it passes."""
    try:
        with m3jax.checks():
            call(*arguments, **options)
    except ValueError as error:
        return str(error)
    return ""


def found_in_rows(positions: jax.Array, lengths: jax.Array, num_keys: int = 7, **nan: tuple[int, ...]) -> str:
    """What attention of one head says of its rows, with NaN in some places of q, k and v."""
    rows, queries = positions.shape
    shapes = dict(q=(rows, queries, 1, 1), k=(rows, num_keys, 1, 1), v=(rows, num_keys, 1, 1))
    operands = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name, index in nan.items():
        operands[name][index] = np.nan
    return found_by(attend, *map(jnp.asarray, operands.values()), positions, lengths)


def test_numbers_are_looked_at_under_checks_alone():
    """Elsewhere a look would fetch them from the device at every call."""
    q, k = jnp.full((1, 1, 1, 1), jnp.nan), jnp.zeros((1, 4, 1, 1))
    attend_selected(q, k, k, ints([[[9]]]), ints([6]), ints(5), block_size=4)


def test_lengths_from_none_to_all_keys_pass():
    at = ints([0], [0])
    assert not found_in_rows(at, ints(0, 7))
    assert "lengths[1] = 8: a row has 0 to 7 keys here" in found_in_rows(at, ints(0, 8))
    assert "lengths[0] = -1: a row has 0 to 7 keys here" in found_in_rows(at, ints(-1, 8))


@pytest.mark.parametrize("devices", [1, 3])
def test_a_view_has_the_keys_of_all_devices_that_share_its_rows(devices):
    share = None if devices == 1 else Share(ints(0, 0), 4, devices, ("context",))
    pages = jnp.zeros((1, 2, 1, 4, 2))
    view = Paged(pages, pages, None, 0, ints([0, 1], [1, 0]), jnp.float32, share)
    call = checked(lambda view, lengths: None)
    most = devices * 2 * 4
    assert not found_by(call, view, ints(most, 0))
    assert f"lengths[0] = {most + 1}: a row has 0 to {most} keys here" in found_by(call, view, ints(most + 1, 0))


def test_each_call_looks_at_the_lengths_of_its_rows():
    """Of keys in rows, and of the scores of their blocks, in which the last block may be cut off."""
    rules = msa.SelectionRules(top_k=3)
    at, floats = ints([6], [6]), lambda *shape: jnp.zeros((2, *shape))
    call = partial(msa.select_blocks, floats(1, 1, 2), at, rules=rules, block_size=4)
    assert not found_by(call, ints(7, 8))
    assert "lengths[1] = 9: a row has 0 to 8 keys here" in found_by(call, ints(7, 9))
    q, k = floats(1, 1, 2), floats(7, 1, 2)
    for call in (
        partial(msa.block_scores, q, k[:, :, 0], at, block_size=4),
        partial(msa.dense_attention, q, k, k, at),
        partial(msa.sparse_attention, q, k, k, ints([[[0, 1]]], [[[0, 1]]]), at, block_size=4),
        partial(msa.msa, q, k, k, q, k[:, :, 0], at, rules=rules, block_size=4),
    ):
        assert "lengths[1] = 8: a row has 0 to 7 keys here" in found_by(
            lambda n, call=call: call(lengths=n), ints(7, 8)
        )


def test_a_call_without_a_token_is_refused_where_a_row_has_keys():
    refused = found_in_rows(ints([5, 6], [-1, -1]), ints(5, 4))
    assert "positions[0, 0] = 5 of a row with 5 keys: all queries are padding" in refused
    assert "positions[1, 1] = 1 of a row with 1 keys" in found_in_rows(ints([-1, 4], [-1, 1]), ints(0, 1))
    for positions, lengths in (
        ([[5, 4]], [5]),  # one of them is a token
        ([[0, -1]], [1]),  # position 0 is one
        ([[-1, -1]], [5]),  # padding that says so
        ([[3, 4]], [0]),  # a row without keys
    ):
        assert not found_in_rows(ints(*positions), ints(*lengths))


def test_only_nan_that_is_read_is_refused():
    """The last key of a row is read, the slot behind it is not; a query at that slot is padding."""
    rows = ints([2, 3, -1], [0, -1, 1]), ints(3, 0)
    assert "k[0, 2, 0, 0] is NaN, one of 1 in k" in found_in_rows(*rows, k=(0, 2))
    assert "v[0, 2, 0, 0] is NaN, one of 1 in v" in found_in_rows(*rows, v=(0, 2))
    assert "q[0, 0, 0, 0] is NaN, one of 1 in q" in found_in_rows(*rows, q=(0, 0))
    for name, index in (("k", (0, 3)), ("v", (0, 3)), ("k", (1, 0)), ("q", (0, 1)), ("q", (0, 2)), ("q", (1, 0))):
        assert not found_in_rows(*rows, **{name: index}), (name, index)


def test_the_smallest_and_largest_id_of_a_selection():
    """10 keys in blocks of 4: ids 0 to 2, of a query at position 9 the last must be there."""
    at = ints([9, 10, 3]), ints(10)
    check = lambda blocks, *at, num_keys: found_by(
        attend_selected, jnp.zeros((1, blocks.shape[2], 1, 1)), *[jnp.zeros((1, num_keys, 1, 1))] * 2, blocks, *at,
        block_size=4,
    )  # fmt: skip

    def found(*chosen, num_keys=10):
        nothing = [-1] * (len(chosen) - 1)
        blocks = ints([[chosen, [-1, *nothing], [0, *nothing]]])
        return check(blocks, *at, num_keys=num_keys)

    assert not found(0, 2, -1) and not found(2, 0, 1) and not found(2, -1, -1)
    assert "ids are -1 to 2 for 10 keys in blocks of 4" in found(0, 2, 3)
    assert "ids are -1 to 2 for 12 keys" in found(0, 2, 3, num_keys=12)
    assert "ids are -1 to 2" in found(-2, 0, 2)
    assert "names a block twice" in found(0, 0, 2)
    later = ints([[[0, 1, -1], [0, 1, -1]]]), ints([3, 4]), ints(10)  # the second query's own block is block 1
    assert "blocks[0, 0, 0] = [0, 1, -1]" in (message := check(*later, num_keys=10))
    assert "names a block behind the query's own, in blocks of 4" in message
    message = found(0, 1, -1)
    assert "blocks[0, 0, 0] = [0, 1, -1], of a query at position 9 of 10, lacks the query's own block" in message
