"""Against transformers' MiniMax-M3: every number on the way, every block set, greedy text, bfloat16, saved folders."""

import copy
import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from support import oracle
from support.comparisons import assert_close, assert_equal, assert_same_sets
from support.oracle import CASES, m3_vl, torch

from m3jax import checkpoint
from m3jax.cache import Cache
from m3jax.completion import generate
from m3jax.config import M3Config
from m3jax.hub import hub_parameters
from m3jax.model import M3
from m3jax.spec import model as definition

# float32: two implementations that sum in different orders. Largest difference seen: 1e-5 (logits are about 2).
LOGITS = 2e-4
# bfloat16: our distance from float32, in norm over all logits, is at most transformers' own plus one rounding.
# It rounds at more points than we do, and its router is bfloat16 too (docs/numerics.md).
BF16_SLACK = 2.0**-8

ON_THE_WAY = ("input", "attention_norm", "q", "k", "v", "index_q", "index_k", "attention", "attention_out", "ffn_norm",
              "ffn_out", "output")  # fmt: skip
LONG = "groups8"  # longer than every chunk that a schedule walks, and the dearest
FEW = ("m3", "coincide")  # M3's own layers, and axes of one size; each of the others compiles a model more
CASE_OF = {name: pytest.param(name, marks=() if name in FEW else pytest.mark.further) for name in CASES}
SPARSE_CASES = [name for name, case in CASES.items() if case.layers != case.layers.lower()]
every_sparse_case = pytest.mark.parametrize("name", [CASE_OF[name] for name in SPARSE_CASES])


@jax.jit
def run(model, tokens, lengths):
    return model.intermediates(tokens, lengths=lengths)


def ours_of(model: M3, tokens: np.ndarray) -> dict[str, Any]:
    return jax.device_get(run(model, tokens, np.full(len(tokens), tokens.shape[1], np.int32)))


@cache
def ours(name: str) -> dict[str, Any]:
    pair = oracle.pair(name)
    return ours_of(pair.ours, pair.case.tokens())


@cache
def theirs(name: str) -> dict[str, Any]:
    pair = oracle.pair(name)
    return oracle.intermediates(pair.theirs, pair.case.tokens())


@cache
def defined(name: str) -> dict[str, Any]:
    """Return the intermediates that the model's definition computes from the same checkpoint."""
    pair, config = oracle.pair(name), oracle.pair(name).ours.config
    run = jax.jit(lambda params, tokens: definition.intermediates(params, tokens, config))
    return jax.device_get(run(hub_parameters(pair.ours), pair.case.tokens()))


def worst(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def sparse_layers(values: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    return [layer for layer in values["layers"] if "blocks" in layer]


# Our definition is compared with ours in test_definition.py; with theirs, in a case with every part and in a long one.
COMPUTED = [*((ours, name) for name in CASES), *((defined, name) for name in ("m3", LONG))]
every_case = pytest.mark.parametrize(
    ("computed", "name"),
    [
        pytest.param(computed, name, marks=CASE_OF[name].marks if computed is ours else pytest.mark.further)
        for computed, name in COMPUTED
    ],
)


@every_case
def test_logits(computed, name):
    assert_close(computed(name)["logits"], theirs(name)["logits"], "logits", "B T V", atol=LOGITS)


@every_case
def test_every_value_on_the_way(computed, name):
    found, expected = computed(name), theirs(name)
    others = {"block_scores", "blocks", "expert_ids", "expert_weights"}
    for layer, (mine, other) in enumerate(zip(found["layers"], expected["layers"], strict=True)):
        assert mine.keys() - {"block_scores"} == other.keys()
        for key in (key for key in ON_THE_WAY if key in mine.keys() - others):  # the first that is wrong is named
            scale = max(1.0, float(np.abs(other[key]).max()))
            assert_close(mine[key], other[key], f"{key} of layer {layer}", atol=LOGITS * scale)
        assert mine.keys() - others <= set(ON_THE_WAY)
    assert_close(found["final_norm"], expected["final_norm"], "final_norm", "B T D", atol=LOGITS)


@pytest.mark.parametrize("name", [CASE_OF[name] for name, case in CASES.items() if "m" in case.layers.lower()])
def test_every_expert_and_its_weight(name):
    for mine, other in zip(ours(name)["layers"], theirs(name)["layers"], strict=True):
        if "expert_ids" in other:
            # Theirs come in no order.
            (ids, weights), (other_ids, other_weights) = (by_id(layer) for layer in (mine, other))
            assert_equal(ids, other_ids, "expert ids in order", "B T A")
            assert_close(weights, other_weights, "expert weights by id", "B T A", atol=1e-5)
            np.testing.assert_allclose(mine["expert_weights"].sum(-1), 1, rtol=1e-6)


def by_id(layer: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(layer["expert_ids"], axis=-1)
    return tuple(np.take_along_axis(layer[k], order, -1) for k in ("expert_ids", "expert_weights"))


# Selection


@every_sparse_case
def test_every_block_set(name):
    for mine, other in zip(sparse_layers(ours(name)), sparse_layers(theirs(name)), strict=True):
        assert_same_sets(mine["blocks"], other["blocks"])


@every_sparse_case
def test_block_scores(name):
    """Pooled by hand from their index queries and keys; and no choice hangs on the last bits."""
    case = CASES[name]
    for mine, other in zip(sparse_layers(ours(name)), sparse_layers(theirs(name)), strict=True):
        scores = pooled(other["index_q"], other["index_k"], case.block)
        seen = np.isfinite(scores)
        np.testing.assert_array_equal(np.isfinite(mine["block_scores"]), seen)
        error = worst(mine["block_scores"][seen], scores[seen])
        assert error < LOGITS
        assert margin(scores, case) > 4 * error


def pooled(index_q: np.ndarray, index_k: np.ndarray, block: int) -> np.ndarray:
    """Block scores [B K T M] in float64."""
    scores = np.einsum("btkh,bsh->bkts", index_q.astype(np.float64), index_k.astype(np.float64))
    length = scores.shape[-1]
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    scores = np.pad(scores, [(0, 0)] * 3 + [(0, -length % block)], constant_values=-np.inf)
    return scores.reshape(*scores.shape[:3], -1, block).max(-1)


def margin(scores: np.ndarray, case: oracle.Case) -> float:
    """The least distance between the last chosen and the first dropped block of any query."""
    own, ids = np.arange(scores.shape[2])[:, None] // case.block, np.arange(scores.shape[-1])
    forced = (ids <= own) & (ids > own - case.local)
    best = np.sort(np.where(forced, 1e9, scores))[..., ::-1]
    last, first = best[..., case.top_k - 1], best[..., case.top_k]
    dropping = np.isfinite(first)
    return float(np.min(last[dropping] - first[dropping]))


@every_sparse_case
def test_visible_blocks_are_dropped(name):
    """T17: a selection that holds all visible blocks proves nothing."""
    case = CASES[name]
    own = np.arange(case.length) // case.block
    assert np.mean(own + 1 > case.top_k) >= 0.5
    for layer in sparse_layers(theirs(name)):
        count = np.sum(layer["blocks"] >= 0, -1)
        np.testing.assert_array_equal(count, np.broadcast_to(np.minimum(own + 1, case.top_k), count.shape))


@pytest.mark.parametrize("name", [CASE_OF[name] for name in SPARSE_CASES if CASES[name].kv_heads > 1])
def test_one_selection_for_all_heads_would_differ(name):
    """T1: the best blocks by the maximum over index heads are not what any single head chose."""
    case = CASES[name]
    late = np.arange(case.length) // case.block >= case.top_k
    for layer in sparse_layers(theirs(name)):
        chosen = layer["blocks"][:, :, late]
        assert np.mean(np.any(chosen != chosen[:, :1], axis=(1, 3))) > 0.5
        scores = pooled(layer["index_q"], layer["index_k"], case.block).max(1)[:, late]
        own = np.arange(case.length)[late, None] // case.block
        ids = np.arange(scores.shape[-1])
        scores = np.where((ids <= own) & (ids > own - case.local), np.inf, scores)
        shared = np.sort(np.argsort(-scores, axis=-1)[..., : case.top_k], axis=-1)
        assert np.mean(np.any(chosen != shared[:, None], axis=-1)) > 0.3


# A cache, padding


def test_a_few_tokens_after_a_cached_prefix():
    """T7: the call has as many tokens as there are KV heads, query heads a group, rows, and tokens in a block."""
    pair = oracle.pair("coincide")
    case, tokens = pair.case, pair.case.tokens(20)
    with torch.no_grad():
        first = pair.theirs(input_ids=torch.from_numpy(tokens[:, :16]).long(), use_cache=True)
    expected = oracle.intermediates(pair.theirs, tokens[:, 16:], past_key_values=first.past_key_values)

    @jax.jit
    def extend(model, tokens, cache, positions, lengths):
        probe = lambda values, _: values["blocks"]
        call = dict(cache=cache, positions=positions, lengths=lengths)
        out = model.run(tokens, **call, probe=probe)
        return out.logits, out.probed, out.cache

    cache, lengths = Cache.init(pair.ours.config, case.batch, 20, "float32"), np.full(case.batch, 4, np.int32)
    positions = np.broadcast_to(np.arange(4, dtype=np.int32), (case.batch, 4))
    for start in range(0, 20, 4):
        now = tokens[:, start : start + 4]
        logits, blocks, cache = extend(pair.ours, now, cache, positions + start, lengths + start)
    assert_close(logits, expected["logits"], "logits", "B T V", atol=LOGITS)
    for mine, other in zip(blocks[0], expected["layers"], strict=True):
        assert_same_sets(mine, other["blocks"])


def test_right_padded_rows():
    """Rows of other lengths, padded on the right, under a mask there and by lengths here (T6)."""
    pair = oracle.pair("m3")
    tokens, lengths = pair.case.tokens(), np.array([301, 190], np.int32)
    real = np.arange(301) < lengths[:, None]
    expected = oracle.logits(pair.theirs, tokens, attention_mask=torch.from_numpy(real).long())
    logits = jax.device_get(run(pair.ours, tokens, lengths))["logits"]
    assert_close(logits[real], expected[real], "logits of tokens", "token V", atol=LOGITS)


@pytest.mark.further
def test_greedy_text():
    """24 tokens after prompts of different lengths: one ragged batch here, one prompt at a time there."""
    pair = oracle.pair("sparse-only")
    prompts = [pair.case.tokens()[0, :90].tolist(), pair.case.tokens()[1, :131].tolist()]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = pair.theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert len(expected[0]) == len(expected[1]) == 24 and len(set(expected[0])) > 8
    assert generate(pair.ours, prompts, max_new_tokens=24, temperature=0, stop_ids=[]) == expected


# bfloat16


@pytest.mark.further  # each rounding: test_roundings.py
@pytest.mark.parametrize("name", ["sparse-only", "dense-only"])
def test_bfloat16(name):
    """Weights that bfloat16 holds exactly: what differs from float32 is the arithmetic alone."""
    case = CASES[name]
    model = oracle.random_model(case)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if not path.endswith("mlp.gate.weight"):
                weight.copy_(weight.to(torch.bfloat16).float())
    folder = oracle.scratch() / f"{name}-bfloat16"
    model.save_pretrained(folder)
    expected = oracle.logits(model, case.tokens())
    theirs = oracle.logits(copy.deepcopy(model).to(torch.bfloat16), case.tokens())
    ours = np.asarray(jax.jit(lambda m, t: m(t))(checkpoint.load(folder, progress=False), case.tokens()))
    assert ours.dtype == np.float32
    size = float(np.linalg.norm(expected))
    distance = [float(np.linalg.norm(x - expected)) / size for x in (ours, theirs)]
    assert 2.0**-9 < distance[0] < distance[1] + BF16_SLACK
    if name == "dense-only":
        # Nothing is chosen, so no choice can flip: a few roundings of 2**-9 each in a layer.
        assert distance[0] < 0.02


# Folders


def test_what_we_save_transformers_loads(tmp_path):
    """Their weights, through our loader and our writer, come back to them bit for bit."""
    pair = oracle.pair("m3")
    checkpoint.save(pair.ours, tmp_path)
    again = m3_vl.MiniMaxM3SparseForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager").eval()
    np.testing.assert_array_equal(oracle.logits(again, pair.case.tokens()), theirs("m3")["logits"])


def test_a_text_only_folder_of_transformers(tmp_path):
    """`MiniMaxM3VLForCausalLM` writes a flat config and names of its own."""
    pair = oracle.pair("m3")
    text = m3_vl.MiniMaxM3VLForCausalLM(pair.theirs.config.text_config)
    text.model.load_state_dict(pair.theirs.model.language_model.state_dict())
    text.lm_head.load_state_dict(pair.theirs.lm_head.state_dict())
    text.save_pretrained(tmp_path)
    model = checkpoint.load(tmp_path, dtype="float32", progress=False)
    assert model.config == dataclasses.replace(pair.ours.config, vision_config=None)
    found = ours_of(model, pair.case.tokens())
    np.testing.assert_array_equal(found["logits"], ours("m3")["logits"])


def test_a_config_of_transformers_without_a_factor_rotates_whole_heads_and_is_refused():
    """It writes rotary_dim and reads it nowhere: what it writes without rope_parameters says 8 and rotates 16."""
    sizes = CASES["m3"].text_config()
    del sizes["rope_parameters"]
    written = m3_vl.MiniMaxM3VLTextConfig(**sizes)
    assert 2 * m3_vl.MiniMaxM3VLRotaryEmbedding(written).inv_freq.size(0) == 16
    data = {key: value for key, value in written.to_dict().items() if key in (*sizes, "rope_parameters")}
    with pytest.raises(ValueError, match="rotary_dim = 8 and head_dim = 16 without partial_rotary_factor disagree"):
        M3Config.from_dict(data)
