"""The invariant mode on a GPU: a request has the same bits alone, in batches, drafted and in training.

M3's heads and widths, a few layers and experts, random bfloat16 weights, and the same in MXFP8. Three looks, so that
where bits differ one run says where: each part of the model by itself, in programs of several shapes; each part inside
of whole models, where what went in had the same bits; and whole requests through engines. Last, requests to a model of
narrow heads, which is computed in tiles.
"""

import copy
import dataclasses
from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3jax import M3Config, quantize
from m3jax.cache import CallPages, Places
from m3jax.config import FULL, SPARSE
from m3jax.decoding import Engine, Generation, Params, Sampling
from m3jax.decoding.device.step import draw_token
from m3jax.decoding.sampling import DrawContext, SamplingParams
from m3jax.execution import Tap, Tiled
from m3jax.execution.tap import HEADS
from m3jax.model import M3, init
from m3jax.model.context import Context, selection_rules
from m3jax.model.layers import activation, rope_table
from m3jax.msa import Paged, PagedIndex
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import attend_all, attend_selected, select
from m3jax.tiles import GPU_OPTIONS, by_tiles
from m3jax.train.losses import token_logprobs
from m3jax.weights import StackedLayer

SEED = 0
TEXT = 2304  # tokens of a text in whole models, more than a selection keeps
PROMPTS = (2500, 1300, 700, 300, 128, 65, 17, 1)
NEIGHBOURS = 600  # tokens of a neighbour's prompt, at most
CHUNK = 256
NEW_TOKENS = 64
TRAINED = 2  # texts


@pytest.fixture(scope="module")
def plain() -> M3:
    """Three layers, the first dense, with 32 experts."""
    full = M3Config.m3()
    first = full.layer_types.index("minimax_m3_sparse") - 1
    config = dataclasses.replace(
        full, num_hidden_layers=3, num_local_experts=32, vision_config=None, eos_token_id=(), bos_token_id=None,
        layer_types=full.layer_types[first : first + 3], mlp_layer_types=full.mlp_layer_types[first : first + 3],
    )  # fmt: skip
    return init(config, 0, "bfloat16").with_invariance()


@pytest.fixture(scope="module", params=["bfloat16", "mxfp8"])
def model(request: pytest.FixtureRequest, plain: M3) -> M3:
    """The model, and the same with weights in MXFP8."""
    return plain if request.param == "bfloat16" else quantize(plain).with_invariance()


# Each part by itself

ROWS, QUERIES = 8, 64
SHAPES = ((1, 1), (8, 1), (8, 4), (3, 63))  # rows, tokens of each; compared with all eight rows of 64
PARTS = (
    "addition, norm", "projections, head norms, RoPE", "index scores, selection", "sparse attention",
    "dense attention", "output projection", "dense MLP", "router", "experts, shared expert, sum",
    "head, log-probability, draw",
)  # fmt: skip


@pytest.fixture(scope="module")
def parts(model: M3):
    return arrays_and_parts(model, np.random.default_rng(SEED))


@pytest.mark.parametrize("part", PARTS)
def test_a_token_has_the_same_bits_in_programs_for_any_number_of_tokens(part, parts):
    arrays, functions = parts
    assert set(functions) == set(PARTS)
    count, compared = differing_tokens(functions[part], arrays)
    assert not count, f"{part}: {count} of {compared} tokens differ"


class NoPages(CallPages):
    """Pages that hold nothing: attention returns its queries, after every head has passed the tap."""

    def write(self, call, k, v, index_k):
        return self

    def select(self, call, index_q, rules):
        return jnp.zeros((*index_q.shape[:3], 1), jnp.int32).swapaxes(1, 2)  # [B K T 1]

    def attend_selected(self, call, q, blocks):
        return q, self


def arrays_and_parts(model: M3, rng: np.random.Generator):
    """(arrays [8 64 ...], the parts): a part is a function of some of the rows and tokens of these arrays."""
    config = model.config
    page_size, width = config.index_block_size, config.hidden_size
    blocks = -(-TEXT // page_size)
    pages = ROWS * blocks

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(jax.random.key(int(rng.integers(2**31))), shape, jnp.float32).astype(dtype)

    lengths = jnp.asarray(rng.integers(QUERIES, TEXT + 1, ROWS), jnp.int32)
    positions = lengths[:, None] - QUERIES + jnp.arange(QUERIES, dtype=jnp.int32)  # [B T]
    table = jnp.asarray(rng.permutation(pages).reshape(ROWS, blocks), jnp.int32)
    heads, kv_heads, index_heads = config.num_attention_heads, config.num_key_value_heads, config.index_n_heads
    experts = rng.random((ROWS * QUERIES, config.num_local_experts)).argsort(1)[:, : config.num_experts_per_tok]
    arrays = dict(
        positions=positions, table=table, lengths=lengths,
        x=normal(ROWS, QUERIES, width), y=normal(ROWS, QUERIES, width, dtype=jnp.float32),
        attention=normal(ROWS, QUERIES, heads * config.head_dim),
        q=normal(ROWS, QUERIES, heads, config.head_dim),
        index_q=normal(ROWS, QUERIES, index_heads, config.index_head_dim),
        expert_ids=jnp.asarray(experts.reshape(ROWS, QUERIES, -1), jnp.int32),
        expert_weights=jnp.abs(normal(ROWS, QUERIES, config.num_experts_per_tok, dtype=jnp.float32)),
    )  # fmt: skip
    k, v = (normal(1, pages, kv_heads, page_size, config.head_dim) for _ in range(2))
    index_k = normal(1, pages, page_size, config.index_head_dim)
    rules = selection_rules(config, model.score)
    view = lambda rows: Paged(k, v, None, 0, rows["table"], jnp.bfloat16)
    index_view = lambda rows: PagedIndex(index_k, None, 0, rows["table"], jnp.bfloat16)
    choose = lambda rows: select(
        rows["index_q"], index_view(rows), rows["positions"], rows["lengths"], rules, schedule="invariant"
    )
    # What is selected is drawn once: attention is to be looked at by itself.
    arrays["blocks"] = jax.jit(choose)(arrays).swapaxes(1, 2)  # [B T K J]

    dense, sparse = model.layer(0), model.layer(1)
    layers = dict(dense=jax.tree.map(lambda p: p[0], dense), sparse=jax.tree.map(lambda p: p[0], sparse))

    how = model.execution()
    rotary = lambda positions: rope_table(positions, config.rotary_dim, config.rope_theta, jnp.dtype("bfloat16"))

    def context_of(rows):
        positions, lengths = rows["positions"], rows["lengths"]
        cos, sin = rotary(positions)
        return Context(positions, lengths, cos, sin, Places.nowhere(positions), config, rules, False, how)

    def norm(weights, rows):
        weight = weights["sparse"].input_layernorm[...]
        return how.add_norm(rows["x"], rows["y"], weight, config.rms_norm_eps)

    def project(weights, rows):
        attention, tap = how.prepared(weights["sparse"].self_attn), Tap()
        attention(rows["x"], context_of(rows), NoPages(), jnp.int32(0), tap)
        return {name: tap.values[name] for name in HEADS}

    def project_out(weights, rows):
        return how.each_token(how.prepared(weights["sparse"].self_attn).project_out)(rows["attention"])

    def run_dense(weights, rows):
        return how.prepared(weights["dense"].mlp)(rows["x"], context_of(rows), jnp.int32(0), Tap())

    def run_router(weights, rows):
        mlp = how.prepared(weights["sparse"].mlp)
        return how.each_token(partial(mlp.route, context=context_of(rows)))(rows["x"])

    def run_experts(weights, rows):
        mlp = copy.copy(weights["sparse"].mlp)
        in_stack = lambda matrix: StackedLayer(matrix, jnp.int32(0))
        mlp.experts = jax.tree.map(in_stack, weights["experts"], is_leaf=lambda x: isinstance(x, MXFP8Array))
        mlp = how.prepared(mlp)
        given = rows["x"], rows["expert_ids"], rows["expert_weights"]
        matrices, act = (mlp.experts.matrices(), mlp.shared_experts.matrices()), activation(config, rows["x"].dtype)
        return how.experts(*given, matrices[0], act, matrices[1], config.routed_scaling_factor)

    def draw(weights, rows):
        x, positions = rows["x"].reshape(-1, width), rows["positions"].reshape(-1)
        sampling = SamplingParams.stack([Sampling(temperature=1.0, seed=1)] * len(x))
        nothing = jnp.zeros(len(x), bool)
        context, sampling = DrawContext(is_edited=nothing), jax.tree.map(jnp.asarray, sampling)
        drawn, _ = draw_token(weights["model"], x, sampling, context, positions, wants_top=nothing, num_top=0)
        return [y.reshape(rows["positions"].shape) for y in (drawn.tokens, drawn.logprobs)]

    def attend_to_blocks(weights, rows):
        chosen = rows["blocks"].swapaxes(1, 2)
        return attend_selected(rows["q"], view(rows), chosen, rows["positions"], rows["lengths"], schedule="invariant")

    def attend_to_all(weights, rows):
        return attend_all(rows["q"], view(rows), rows["positions"], rows["lengths"], schedule="invariant")

    weights = layers | {"experts": sparse.mlp.experts, "model": model}
    parts = {
        "addition, norm": norm, "projections, head norms, RoPE": project, "index scores, selection":
        lambda weights, rows: choose(rows).swapaxes(1, 2), "sparse attention": attend_to_blocks,
        "dense attention": attend_to_all, "output projection": project_out, "dense MLP": run_dense,
        "router": run_router, "experts, shared expert, sum": run_experts,
        "head, log-probability, draw": draw,
    }  # fmt: skip
    return arrays, {name: partial(fn, weights) for name, fn in parts.items()}


def differing_tokens(part, arrays: dict) -> tuple[int, int]:
    """Return (tokens whose bits in a smaller program differ from those in the program of all, tokens compared)."""
    weights, fn = part.args[0], part.func
    program = jax.jit(fn, compiler_options=GPU_OPTIONS)

    def run(rows, queries):
        per_row = ("table", "lengths")
        chosen = {name: x[rows] if name in per_row else x[rows, queries] for name, x in arrays.items()}
        return token_bits(program(weights, chosen))

    whole, differing, compared = run(slice(None), slice(None)), 0, 0
    for batch, length in SHAPES:
        for first in sorted({0, QUERIES // 3, QUERIES - length} if length < QUERIES // 2 else {0}):
            rows, queries = (slice(ROWS - batch, ROWS), slice(first, first + length))
            same = run(rows, queries) == whole[rows, queries]
            differing, compared = differing + int((~same).sum()), compared + same.size
    return differing, compared


def token_bits(tree) -> np.ndarray:
    """A number for each token [B T] that is the same where all bits of some arrays [B T ...] are."""
    return np.asarray(sum(bits_hash(x) * np.uint32(2 * i + 1) for i, x in enumerate(jax.tree.leaves(tree))))


@jax.jit
def bits_hash(x: jax.Array) -> jax.Array:
    """uint32 [B T] of the bits of [B T ...]; a sum of integers, which has no order."""
    batch, length = x.shape[:2]
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32).reshape(batch, length, -1)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2654435761)
    odd = jnp.arange(bits.shape[-1], dtype=jnp.uint32) * jnp.uint32(2246822519) | jnp.uint32(1)
    return jnp.sum((bits ^ (bits >> 13)) * odd, axis=-1, dtype=jnp.uint32)


# Each part inside of whole models

# What each part of a layer reads: values of the token itself, and values of all of its row up to it.
READS = {
    "attention_norm": (("input",), ()),
    "q": (("attention_norm",), ()),
    "k": (("attention_norm",), ()),
    "v": (("attention_norm",), ()),
    "index_q": (("attention_norm",), ()),
    "index_k": (("attention_norm",), ()),
    "blocks": (("index_q",), ("index_k",)),
    "attention": (("q", "blocks"), ("k", "v")),
    "attention_out": (("attention",), ()),
    "ffn_norm": (("input", "attention_out"), ()),
    "expert_ids": (("ffn_norm",), ()),
    "expert_weights": (("ffn_norm",), ()),
    "ffn_out": (("ffn_norm", "expert_ids", "expert_weights"), ()),
    "output": (("input", "attention_out", "ffn_out"), ()),
}


def test_a_text_has_the_same_bits_in_chunks_steps_and_proposals_as_whole_and_alone(model):
    """Fixed texts, whole and alone, in chunks of eight rows, in steps, among proposals: which part differs first."""
    rng = np.random.default_rng(SEED)
    config, length = model.config, TEXT
    texts = rng.integers(0, config.vocab_size, (ROWS, length)).astype(np.int32)
    blocks = -(-length // config.index_block_size)
    cache = model.new_cache(ROWS * blocks, ROWS, blocks)
    table = jnp.asarray(rng.permutation(ROWS * blocks).reshape(ROWS, blocks), jnp.int32)
    run = jax.jit(bits_of_call, donate_argnums=1, compiler_options=GPU_OPTIONS)

    def call(cache, rows, start, width):
        positions = np.broadcast_to(np.arange(start, start + width, dtype=np.int32), (len(rows), width))
        tokens = texts[rows][:, start : start + width]
        lengths = np.full(len(rows), start + width, np.int32)
        bits, cache = run(model, cache.replace(table=table[rows]), tokens, positions, lengths)
        return [{name: np.asarray(x) for name, x in layer.items()} for layer in bits], cache

    every_row = np.arange(ROWS)
    alone = [[] for _ in every_row]
    for row in every_row:
        alone[row], cache = call(cache, every_row[row : row + 1], 0, length)
    whole = [{name: np.concatenate([alone[row][i][name] for row in every_row]) for name in layer}
             for i, layer in enumerate(alone[0])]  # of each layer, and last the head: [B T]  # fmt: skip
    last = length - 8
    programs = {
        "step of 1 row": [(every_row[:1], last + i, 1) for i in range(4)],
        "step of 8 rows": [(every_row, last + i, 1) for i in range(4)],
        "8 rows of 4 columns": [(every_row, last, 4)],
        f"chunks of 8 x {length // 8}": [(every_row, i * (length // 8), length // 8) for i in range(8)],
    }
    differing = []
    for name, calls in programs.items():
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for rows, start, width in calls:
            bits, cache = call(cache, rows, start, width)
            for layer, values in enumerate(bits):
                count(counts, values, {key: x[rows] for key, x in whole[layer].items()}, start)
        differing += [
            f"{name}, {part}: {by_itself} of {compared} tokens and layers where what it read had the same bits; "
            f"{after_others} where not"
            for part, (by_itself, after_others, compared) in counts.items()
            if by_itself or after_others
        ]
    assert not differing, "\n".join(differing)


def bits_of_call(model, cache, tokens, positions, lengths):
    """(bits [B T] of every named value of each layer and of the head, the cache)."""
    keep = lambda values, context: {
        name: bits_hash(x.swapaxes(1, 2) if name == "blocks" else x) for name, x in values.items()
    }
    out = model.run(tokens, cache=cache, positions=positions, lengths=lengths, probe=keep, logits=False)
    final = out.hidden
    rows = final.reshape(1, -1, final.shape[-1])
    of_logits = lambda x: bits_hash(model.unembed(x)[None])[0]
    logits = by_tiles(of_logits, model.compute.token_tile, rows[0]).reshape(tokens.shape)
    layers = [{name: x[i] for name, x in values.items()} for values in out.probed for i in range(len(values["input"]))]
    return [*layers, {"final norm": bits_hash(final), "logits": logits}], out.cache


def count(counts: dict[str, list[int]], found: dict, whole: dict, start: int) -> None:
    """Add one call's tokens: [differs by itself, differs after others, compared], by part."""
    width = next(iter(found.values())).shape[1]
    columns = slice(start, start + width)
    same = {name: x == whole[name][:, columns] for name, x in found.items()}
    for part in found:
        if part == "input":
            continue
        of_token, of_row = READS.get(part, (("final norm",) if part == "logits" else (), ()))
        reads_same = np.ones_like(same[part])
        for name in of_token:
            reads_same &= same.get(name, True)
        for name in of_row:
            # Earlier calls put the same bits there, or their own parts are found to differ.
            reads_same &= np.cumprod(same[name], axis=1).astype(bool)
        counts[part][0] += int((~same[part] & reads_same).sum())
        counts[part][1] += int((~same[part] & ~reads_same).sum())
        counts[part][2] += same[part].size


# Whole requests


def test_a_request_has_the_same_bits_alone_beside_others_drafted_and_in_training(plain):
    """Greedy and sampled texts of eight requests."""
    model, rng = plain, np.random.default_rng(SEED)
    vocabulary = model.config.vocab_size
    prompts = [rng.integers(0, vocabulary, n).tolist() for n in PROMPTS]
    neighbours = [rng.integers(0, vocabulary, n).tolist() for n in rng.integers(1, NEIGHBOURS, 24)]
    # A prompt that repeats itself is what a lookup of earlier tokens finds its proposals in.
    prompts = [(prompt[: len(prompt) // 4 + 1] * 4)[: len(prompt)] for prompt in prompts]
    longest = max(PROMPTS) + NEW_TOKENS
    shapes = {
        "alone": dict(max_batch=1, prefill_chunk=longest),
        "in a batch of 8": dict(max_batch=8, prefill_chunk=CHUNK),
        "in a batch of 32": dict(max_batch=32, prefill_chunk=CHUNK),
        "8, drafted": dict(max_batch=8, prefill_chunk=CHUNK, draft="ngram"),
    }
    lengths = [len(prompt) + NEW_TOKENS for prompt in (*prompts, *neighbours)]
    pages = sum(-(-n // model.config.index_block_size) + 1 for n in lengths)
    results = {}
    for name, shape in shapes.items():
        engine = Engine(model, pages=pages, max_length=longest, steps_per_call=16, prefix_cache=False, **shape)
        engine.warmup()
        results[name] = serve(engine, prompts, neighbours if "32" in name else [])

    differing = []
    for name in list(shapes)[1:]:
        pairs = list(zip(results[name], results["alone"], strict=True))
        tokens, bits = sum(a.tokens != b.tokens for a, b in pairs), sum(a.logprobs != b.logprobs for a, b in pairs)
        if tokens or bits:
            differing.append(
                f"{name}: of {len(pairs)} requests {tokens} have other tokens than alone, {bits} other bits"
            )
    texts = list(zip(prompts, results["alone"], strict=True))[2 : 2 + TRAINED]
    wrong, compared = training_differs(model, texts, longest)
    if wrong:
        differing.append(f"training: {wrong} of {compared} log-probabilities differ")
    assert not differing, "\n".join(differing)


def serve(engine: Engine, prompts: list[list[int]], neighbours: list[list[int]]) -> list[Generation]:
    """Serve prompts beside neighbours, every second one greedily, the others sampled; return the prompts' results."""
    greedy, sampled = (Params(max_new_tokens=NEW_TOKENS, sampling=how, stop_ids=())
                       for how in (Sampling.greedy(), Sampling(temperature=1.0, seed=7)))  # fmt: skip
    handles = [engine.add(prompt, (greedy, sampled)[i % 2]) for i, prompt in enumerate(prompts)]
    for prompt in neighbours:
        engine.add(prompt, sampled)
    engine.run()
    return [engine.result(handle) for handle in handles]


def training_differs(model: M3, texts: list[tuple[list[int], Generation]], longest: int) -> tuple[int, int]:
    """(how many of the log-probabilities under a gradient are not those of the engine, of how many)."""
    tokens = np.zeros((len(texts), longest), np.int32)
    for row, (prompt, found) in zip(tokens, texts, strict=True):
        row[: len(prompt) + len(found.tokens)] = [*prompt, *found.tokens]
    logprobs = np.asarray(jax.jit(token_logprobs, compiler_options=GPU_OPTIONS)(model, jnp.asarray(tokens)))
    differing = [
        logprobs[row, len(prompt) - 1 : len(prompt) - 1 + len(found.tokens)] != np.float32(found.logprobs)
        for row, (prompt, found) in enumerate(texts)
    ]
    return int(np.sum(differing)), np.size(differing)


# Whole requests of a model that no kernel of one order takes


def test_a_model_in_tiles_draws_and_reads_the_same_bits():
    """Heads of 16: a step scatters keys into pages head by head, a prompt and a trainer have them token by token."""
    config = M3Config(
        vocab_size=1024, hidden_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        head_dim=16, intermediate_size=64, dense_intermediate_size=256, shared_intermediate_size=64,
        num_local_experts=32, num_experts_per_tok=4, rotary_dim=8, layer_types=(FULL, SPARSE, SPARSE),
        mlp_layer_types=("dense", "sparse", "sparse"), index_n_heads=4, index_head_dim=16, index_block_size=16,
        index_topk_blocks=8, max_position_embeddings=1024,
    )  # fmt: skip
    model, rng = init(config, 0, "bfloat16").with_invariance(), np.random.default_rng(SEED)
    assert isinstance(model.execution(), Tiled)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in (300, 280, 257, 190, 129, 64, 17, 3)]
    longest = len(prompts[0]) + NEW_TOKENS
    pages = sum(-(-(len(prompt) + NEW_TOKENS) // config.index_block_size) + 1 for prompt in prompts)
    engine = Engine(
        model, pages=pages, max_length=longest, max_batch=len(prompts), prefill_chunk=CHUNK, steps_per_call=16,
        kv_dtype="float32", index_dtype="float32",
    )  # fmt: skip
    wrong, compared = training_differs(model, list(zip(prompts, serve(engine, prompts, []), strict=True)), longest)
    assert not wrong, f"{wrong} of {compared} log-probabilities differ"
