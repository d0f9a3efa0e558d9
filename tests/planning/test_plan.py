"""The planner: its arithmetic against real arrays, its meshes and arguments, its question to a TPU compiler."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny, vision

from m3jax import plan
from m3jax.cache import Cache
from m3jax.config import M3Config
from m3jax.model import quantize
from m3jax.model.build import WEIGHTS, num_bytes
from m3jax.parallel import AXES, parse_mesh
from m3jax.planning import M3_DRAFT, Job, candidates, compiler, evaluate, parse_sizes, parse_slice
from m3jax.planning.arithmetic import Memory, cache_shapes, memory
from m3jax.planning.report import as_dict

CONFIG = tiny.config("dM")
QUICK = {"xla_backend_optimization_level": 0}
MESHES = ["tensor=8", "expert=4,tensor=2", "data=2,context=4", "data=2,context=2,tensor=2"]


def job(topology: str = "h200:8", **changes) -> Job:
    values = dict(config=CONFIG, slice=parse_slice(topology), context=256, batch=4, dtype="float32", chunk=8)
    return Job(**(values | changes))


def full(topology: str, **changes) -> Job:
    return job(topology, **dict(config=M3Config.m3(), context=1 << 20, dtype="bfloat16", chunk=2048) | changes)


def sizes(text: str) -> dict[str, int]:
    return dict(parse_mesh(text).shape)


def held(tree) -> int:
    """Bytes that the first device has."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("topology", "context", "chunk"), [("h200:8", 9000, 8192), ("v5e:4x4", 9000, 2048), ("h200:1", 50, 50)]
)
def test_the_default_chunk_is_the_engines_own_there(topology, context, chunk):
    """A GPU's engine takes 8,192 tokens of a prompt at once, any other's 2,048; a context may be shorter."""
    config = dataclasses.replace(CONFIG, max_position_embeddings=16384)
    assert job(topology, config=config, context=context, chunk=None).chunk == chunk


# Arithmetic


@pytest.mark.parametrize("mesh", MESHES)
def test_memory_is_that_of_real_arrays(mesh):
    real = parse_mesh(mesh)
    planned = memory(job(kv_dtype="bfloat16"), sizes(mesh))
    assert planned.weights == held(tiny.model(CONFIG, mesh=real))
    cache = Cache.init(CONFIG, 4, 256, "float32", real, kv_dtype="bfloat16")
    assert planned.cache + planned.index_keys == held(cache)
    assert planned.index_keys == held([stack.index_k for stack in cache.stacks])


@pytest.mark.further
@pytest.mark.parametrize("mesh", ["expert=4,tensor=2"])
def test_memory_of_kept_mxfp8_weights_is_that_of_real_arrays(mesh):
    config = tiny.config("dM", intermediate_size=64, dense_intermediate_size=192, shared_intermediate_size=128)
    kept = quantize(tiny.model(config, mesh=parse_mesh(mesh)))
    assert memory(job(config=config, weights="mxfp8"), sizes(mesh)).weights == held(kept)


@pytest.mark.parametrize("topology", ["h200:4", "h100:8"])
def test_the_whole_model_fits_four_h200s_or_eight_h100s_in_mxfp8_alone(topology):
    """32 numbers and their scale are 33 bytes, not 64."""
    best = {weights: candidates(full(topology, context=1 << 17, weights=weights))[0] for weights in WEIGHTS}
    assert best["mxfp8"].memory.fits and not best["dequantize"].memory.fits
    sizes = dict(data=1, context=1, expert=parse_slice(topology).num_devices, tensor=1)
    kept, plain = (evaluate(full(topology, weights=weights), sizes) for weights in ("mxfp8", "dequantize"))
    experts_share = kept.memory.experts / plain.memory.experts
    assert experts_share == pytest.approx((1 + 1 / 32) / 2)
    # A step of 4 rows reads the experts that 16 pairs meet, and of all else everything but the embedding, once.
    met = 57 * 128 * (1 - (127 / 128) ** 16) / parse_slice(topology).num_devices * 3 * 6144 * 3072
    saved = met * (2 - 33 / 32) + plain.memory.other_weights - kept.memory.other_weights
    assert kept.decode.flops == plain.decode.flops
    assert plain.decode.traffic - kept.decode.traffic == pytest.approx(saved)


def test_mxfp8_divides_between_blocks_alone():
    """A device of 8 on the tensor axis would have 24 of the dense MLP's 192 input channels."""
    config = tiny.config("dM", intermediate_size=256, dense_intermediate_size=192, shared_intermediate_size=256)
    with pytest.raises(ValueError, match="tensor = 8 cuts through blocks of 32 input channels"):
        parse_sizes("tensor=8", job(config=config, weights="mxfp8"))


def test_the_abstract_cache_lies_where_the_real_one_does():
    mesh = parse_mesh("data=2,context=2,tensor=2")
    real = jax.tree.leaves(Cache.init(CONFIG, 4, 256, "float32", mesh))
    for array, shape in zip(real, cache_shapes(job(), mesh), strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)


def test_one_device_holds_all_of_the_published_model():
    """427.04e9 elements, less the vision tower, of which the routers have 4 bytes."""
    planned = memory(full("h200:1"), dict.fromkeys(AXES, 1))
    assert 2 * 426e9 < planned.weights < 2 * 427.1e9
    tokens = 4 * 2**20
    assert planned.cache + planned.index_keys == pytest.approx(tokens * 137_472, rel=1e-3)
    # While it decodes, a GPU holds a copy of what layers have besides experts: attention, MLPs, shared experts.
    attention, index = 2 * 6144 * (64 + 4) * 128, 6144 * (4 + 1) * 128
    layers = 60 * attention + 57 * index + 3 * 3 * 6144 * 12288 + 57 * 3 * 6144 * 3072
    assert planned.temporaries == pytest.approx(2 * layers, rel=0.01)


def test_the_draft_is_its_file_and_its_keys():
    """6,527,471,616 bytes of weights; keys and values of 64 heads, and a feature of each page's last token."""
    with_draft, without = (memory(full("h200:1", draft=draft), dict.fromkeys(AXES, 1)) for draft in (M3_DRAFT, None))
    weights = with_draft.draft - 2**22 * 2 * 64 * 128 * 2 - 2**15 * 6144 * 2
    assert without.draft == 0 and weights == 6_527_471_616
    # Devices of the context axis share the pages and the head, whatever the width of a feature: 6145 is odd.
    odd = dataclasses.replace(M3_DRAFT, hidden_size=6145)
    whole = memory(full("h200:1", draft=odd), dict.fromkeys(AXES, 1)).draft
    shared = 2**22 * 2 * 64 * 128 * 2 + 2**15 * 6145 * 2 + 6145 * odd.vocab_size * 2  # keys and values, edges, head
    assert whole - memory(full("h200:8", draft=odd), sizes("context=8")).draft == shared * 7 / 8


def test_three_axes_share_out_a_chunk_alike():
    """Data, context and expert: pairs of a token and an expert, and attention, whose parts are joined."""
    planned = full("h200:8", batch=8)
    data, context, expert = (
        evaluate(planned, parse_sizes(f"{axis}=8", planned)).prefill for axis in ("data", "context", "expert")
    )
    assert data.flops == pytest.approx(context.flops, rel=1e-3) and context.flops == pytest.approx(expert.flops)
    assert data.sent == context.sent > 0


def bytes_read(**types) -> float:
    """Return the bytes that a decode step of two sparse layers and a dense one reads, on one device."""
    config = tiny.config("dMM")
    planned = job(config=config, context=100, batch=3, **types)
    return evaluate(planned, dict.fromkeys(AXES, 1)).decode.traffic


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("index", ["float32", "bfloat16", "float8_e4m3fn"])
def test_traffic_counts_keys_and_index_keys_by_their_own_dtypes(kv, index):
    """3 rows of 100 tokens: 2 x 4 heads of 16 dims of all keys in the dense layer and of 3 blocks of 8 in the two
    sparse ones; 20 dims of all index keys in these two."""
    size = lambda dtype: np.dtype(jnp.dtype(dtype)).itemsize
    kv_numbers = 3 * 2 * 4 * 16 * (100 + 2 * 3 * 8)
    index_numbers = 3 * 20 * 2 * 100
    saved = bytes_read() - bytes_read(kv_dtype=kv, index_dtype=index)
    expected = kv_numbers * (4 - size(kv)) + index_numbers * (4 - size(index))
    assert saved == pytest.approx(expected), f"keys in {kv}, index keys in {index}: saves {saved}, expected {expected}"


@pytest.mark.parametrize(("tensor_size", "held_heads"), [(1, 4), (2, 2), (4, 1), (8, 4)])
def test_kv_heads_that_the_axis_cannot_divide_are_read_whole(tensor_size, held_heads):
    """8 devices have all 4 heads each: keys and values of 4 rows of 256 tokens, of 3 blocks of 8 in a sparse layer."""
    mesh = dict.fromkeys(AXES, 1) | {"tensor": tensor_size}
    wide, narrow = (evaluate(job(kv_dtype=dtype), mesh).decode.traffic for dtype in ("float32", "bfloat16"))
    assert wide - narrow == 2 * 2 * held_heads * 16 * 4 * (256 + 24)


def test_a_sum_over_eight_devices_sends_seven_eighths_twice():
    """4 tokens of a model with two dense layers: 5 sums of 48 numbers, and logits, which are gathered: sent once."""
    sent = evaluate(job(config=tiny.config("dd")), dict.fromkeys(AXES, 1) | {"tensor": 8}).decode.sent
    expected = 7 / 8 * (2 * 4 * 4 * 48 * 5 + 4 * 4 * 64)
    assert sent == pytest.approx(expected), f"sent {sent}, expected {expected}"


def test_divided_tokens_send_three_quarters_of_their_sums():
    """256 tokens of two dense layers in 16 bits: 4 sums are scattered, 4 inputs gathered; the embedding's is whole."""
    dense = job(config=tiny.config("dd"), chunk=256, dtype="bfloat16")
    sent = evaluate(dense, dict.fromkeys(AXES, 1) | {"tensor": 4}).prefill.sent
    expected = 3 / 4 * (256 * 48 * (4 * (4 + 2) + 2 * 4) + 4 * 4 * 64)
    assert sent == pytest.approx(expected), f"sent {sent}, expected {expected}"


def test_pages_that_a_mesh_does_not_divide_are_rounded_up():
    """5 blocks of 3 rows are 15 pages, and 8 devices have 2 each, as the real cache has."""
    mesh = "data=2,context=4"
    planned = memory(job(context=40, batch=3), sizes(mesh))
    found = planned.cache + planned.index_keys
    expected = held(Cache.init(CONFIG, 3, 40, "float32", parse_mesh(mesh)))
    assert found == expected, f"the cache takes {found} bytes of a device, expected {expected}"


def test_a_round_with_a_draft_verifies_its_proposals_too():
    """3 proposals and the newest token: nearly four times the work of a step without a draft."""
    alone, drafted = (evaluate(full("h200:8", draft=draft), dict.fromkeys(AXES, 1)) for draft in (None, M3_DRAFT))
    ratio = drafted.decode.flops / alone.decode.flops
    assert 3.5 < ratio < 5, f"a round is {ratio:.2f} times a step"


@pytest.mark.parametrize("mesh", ["tensor=8", "data=2,context=4"])
def test_steps_of_a_draft_read_no_embedding(mesh):
    """A step looks up the row of a token: an embedding of the draft's own takes memory, and no traffic."""
    own, shared = (
        evaluate(full("h200:8", draft=dataclasses.replace(M3_DRAFT, own_embedding=owned)), sizes(mesh))
        for owned in (True, False)
    )
    assert own.decode == shared.decode
    embedding = 200064 * 6144 * 2 / (8 if mesh == "tensor=8" else 1)
    assert own.memory.draft - shared.memory.draft == embedding


def test_all_that_lies_on_a_device_has_to_fit():
    parts = dict(experts=3.0, other_weights=2.0, cache=7.0, index_keys=1.0, draft=4.0, temporaries=6.0)
    assert Memory(**parts, limit=23.0).fits
    assert not Memory(**parts, limit=22.0).fits


# Images


def test_the_tower_is_planned_as_it_lies():
    """Its weights on a device are those of real arrays; a model with one plans its text as a model without."""
    config = vision.config("dM")
    for mesh in ("tensor=2", "tensor=8"):  # 3 heads divide over neither, hidden widths of 88 and 72 over both
        planned = evaluate(job(config=config, images=2), sizes(mesh))
        assert planned.memory.vision == held(tiny.model(config, mesh=parse_mesh(mesh)).vision)
        assert planned.memory.weights == memory(job(), sizes(mesh)).weights
        assert planned.decode == evaluate(job(), sizes(mesh)).decode


def test_no_more_keys_are_read_than_there_are():
    """20 tokens are fewer than 3 blocks of 8: to select 3 or 30 of them is the same work."""
    few, many = (evaluate(job(config=tiny.config("dM", index_topk_blocks=n), context=20, chunk=20),
                          dict.fromkeys(AXES, 1)) for n in (3, 30))  # fmt: skip
    assert (few.decode, few.prefill) == (many.decode, many.prefill)


# Meshes and arguments


def test_candidates_are_all_meshes_and_the_first_is_the_fastest_that_fits():
    planned = full("v5p:4x4x4", context=1 << 19)  # where the fastest mesh does not fit
    found, chip = candidates(planned), planned.slice.chip
    assert len({candidate.name for candidate in found}) == len(found)
    assert all(np.prod(list(candidate.sizes.values())) == 64 for candidate in found)
    fitting = [candidate for candidate in found if candidate.memory.fits]
    times = [candidate.decode.roofline(chip) * candidate.prefill.roofline(chip) for candidate in fitting]
    assert fitting and found[: len(fitting)] == fitting and times[0] == min(times)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--topology v5q:4x4x4", "unknown chip 'v5q'; the nearest known is 'v5"),
        ("--topology v5p:4x4x5", "the nearest valid is 'v5p:4x4x4'"),
        ("--topology v5e:3x3", "the nearest valid is 'v5e:2x4'"),
        ("--topology v6e:", "the nearest valid is 'v6e:2x2'"),
        ("--topology h200:12", "1 to 8 devices; the nearest valid is 'h200:8'"),
        ("--topology h200:8 --context 1048577", "1 to 1048576 (the model's context); the nearest is 1048576"),
        ("--topology h200:8 --batch 0", "--batch 0: must be 1 to"),
        ("--topology h200:8 --weights fp8", "--weights 'fp8': allowed are dequantize, mxfp8"),
        ("--topology h200:8 --kv-dtype int8", "--kv-dtype 'int8': allowed are"),
        ("--topology h200:8 --mesh tensor=4", "is 4 devices and h200:8 has 8; the nearest valid is"),
        ("--topology v5p:4x4x12 --mesh tensor=192", "tensor = 192 does not divide 64 heads"),
        ("--topology h200:6 --mesh data=2,expert=3", "expert = 3 does not divide 128 experts; the nearest valid is"),
        ("--topology h200:8 --mesh data=8", "data = 8 does not divide 1 rows; the nearest valid is"),
        ("--topology h200:8 --mesh rows=8", "write axis=size pairs of data, context, expert, tensor"),
        ("--topology h200:8 --mesh tensor=8,tensor=4", "write axis=size pairs of data, context, expert, tensor"),
        ("--topology h200:8 --mesh tensor=0", "mesh 'tensor=0': give sizes of at least 1"),
        ("--topology h200:8 --model nowhere", "no such model folder: nowhere"),
        ("--topology h200:8 --compile", "--compile: h200:8 is no TPU"),
        ("--topology h200:8 --images -1", "--images -1: must be 1 to 4096"),
        ("--topology h200:8 --what", "unrecognized arguments: --what"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    given = arguments.split() + ([] if "--context" in arguments else ["--context", "1024"])
    assert plan.main(given) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_a_nearest_mesh_is_a_mesh():
    planned = full("v5p:4x4x4")
    with pytest.raises(ValueError, match="nearest valid is") as error:
        parse_sizes("expert=5,tensor=7", planned)
    assert parse_sizes(re.search(r"valid is '([^']*)'", str(error.value))[1], planned)


def test_without_a_compiler_a_tpu_is_planned_by_arithmetic_and_a_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    asked = ["--topology", "v5e:2x2", "--context", "1024"]
    assert plan.main(asked) == 1
    out, err = capsys.readouterr()
    assert "by arithmetic: nothing was compiled" in out
    assert err.startswith("m3jax.plan: note: planned by arithmetic: ") and "pip install 'jax[tpu]'" in err
    assert err.count("\n") == 1
    assert plan.main([*asked, "--no-compile"]) == 1
    assert capsys.readouterr() == (out, "")
    assert plan.main([*asked, "--compile"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "pip install 'jax[tpu]'" in err and err.count("\n") == 1


def test_a_gpu_is_planned_by_arithmetic_and_says_so(capsys):
    assert plan.main(["--topology", "b200:8", "--context", "1048576", "--batch", "1", "--draft"]) == 0
    out = capsys.readouterr().out
    assert "by arithmetic: nothing was compiled" in out and "draft" in out and "\nfits\n" in out
    assert plan.main(["--topology", "h100:8", "--context", "1048576", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["how"] == "arithmetic" and not data["fits"] and data["memory"]["total"] > data["memory"]["limit"]


def test_heads_of_a_draft_that_the_tensor_axis_cannot_divide_are_on_every_device():
    """As those of the model: 2 KV heads over 8 devices are held 8 times, 64 once; no page is divided for them."""
    few = dataclasses.replace(M3_DRAFT, num_key_value_heads=2)
    drafts = {
        heads: memory(full("h200:8", draft=draft), sizes("tensor=8")).draft
        for heads, draft in ((2, few), (64, M3_DRAFT))
    }
    longer = {
        heads: memory(full("h200:8", draft=draft, context=1 << 19), sizes("tensor=8")).draft
        for heads, draft in ((2, few), (64, M3_DRAFT))
    }
    half_context = 2**19 * 4  # tokens, of four rows
    edges = half_context // 128 * 6144 * 2
    key_bytes = {heads: drafts[heads] - longer[heads] - edges for heads in drafts}
    assert key_bytes == {2: half_context * 2 * 2 * 128 * 2, 64: half_context * 2 * 64 * 128 * 2 / 8}


def test_memory_is_the_compilers_where_it_took_every_program():
    """The larger program counts; where one was refused, all of it is the plan's own."""
    planned = full("v5p:4x4x4")
    best = candidates(planned)[0]
    took = {key: {} for key in ("collectives", "collective_bytes", "hidden_collectives")}
    took |= dict(flops=1.0, traffic=1.0, unknown_loops=0, heaviest=[])
    decode = took | dict(arguments=7e10, temporaries=1e9, fresh_outputs=2e8, code=3e7)
    prefill = took | dict(arguments=6e10, temporaries=5e9, fresh_outputs=1e8, code=2e7)
    found = as_dict(planned, best, [best], {"decode": decode, "prefill": prefill})["memory"]
    assert (found["temporaries"], found["arguments"]) == (5e9 + 1e8 + 2e7, 7e10)
    assert found["total"] == 7e10 + best.memory.vision + best.memory.draft + found["temporaries"]
    for answers in ({"decode": decode, "prefill": {"error": "RESOURCE_EXHAUSTED"}}, {}):
        alone = as_dict(planned, best, [best], answers)["memory"]
        assert alone["temporaries"] == best.memory.temporaries and "arguments" not in alone
    refused = {"error": "RESOURCE_EXHAUSTED", "lower_seconds": 1.0, "compile_seconds": 1.0}
    assert not as_dict(planned, best, [best], {"decode": refused, "prefill": refused})["fits"]


# The compiler

SPARSE = tiny.config("M")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict:
    """Run the command line for a tiny model on four TPUs, by their topology alone, and return its JSON."""
    folder = tmp_path_factory.mktemp("model")
    SPARSE.save_pretrained(folder)
    command = [sys.executable, "-m", "m3jax.plan", "--topology", "v5e:2x2", "--context", "128", "--batch", "2"]
    command += ["--prefill-chunk", "8"]  # not 2,048, for which the compiler takes three times as long
    command += ["--model", str(folder), "--mesh", "expert=2,tensor=2", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    root = Path(plan.__file__).parents[1]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.further  # a TPU compiles in tests/kernels, too
def test_both_programs_compile_for_a_slice(compiled):
    assert compiled["how"] == "compiled" and compiled["fits"] and compiled["devices"] == 4
    for name in ("decode", "prefill"):
        program = compiled[name]["compiled"]
        assert program["compile_seconds"] > 0 and program["collectives"]["all-reduce"] > 0 and program["flops"] > 0


@pytest.mark.further
def test_the_compiler_s_arguments_are_the_planned_ones(compiled):
    """Weights and cache; the rest is a few numbers a row, and what tiles of the TPU add to small arrays."""
    planned = sum(compiled["memory"][name] for name in ("weights", "keys_and_values", "index_keys"))
    whole = num_bytes(tiny.model(SPARSE)) / 2 + Cache.init(SPARSE, 2, 128).nbytes
    assert planned < whole and planned * 0.9 < compiled["decode"]["compiled"]["arguments"] < planned * 8
