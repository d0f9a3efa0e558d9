"""Damaged model folders: whatever is changed, reading gives a value or an error that a user can act on.

`M3JAX_HYPOTHESIS=thorough` draws a thousand damages of each kind.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.damage import damaged_bytes, damaged_json, outcome, sometimes

from m3jax import M3Config
from m3jax.assets import embedded_draft_path, embedded_path
from m3jax.checkpoint import load, load_draft, save
from m3jax.completion import Defaults
from m3jax.model import init
from m3jax.text import Tokenizer

INDEX = "model.safetensors.index.json"
CONFIG = M3Config(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    intermediate_size=8, dense_intermediate_size=24, shared_intermediate_size=8, num_local_experts=2,
    num_experts_per_tok=1, layer_types=("full_attention", "minimax_m3_sparse"), mlp_layer_types=("dense", "sparse"),
    rotary_dim=4, index_n_heads=1, index_head_dim=8, index_block_size=4, index_topk_blocks=2,
)  # fmt: skip
NAMES = ("../x.safetensors", "/etc/passwd", "a/b.safetensors", "x" * 300 + ".safetensors", "\0.safetensors",
         "config.json", "", ".", "..", "\x1b[2J.safetensors", INDEX, "model-00009-of-00003.safetensors")  # fmt: skip
# Parts of a tokenizer.json that the embedded one has not; at some the library panics, ends the process or hangs.
_BPE = {"type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]]}
PARTS: dict[str, tuple] = {
    "normalizer": (
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "Precompiled", "precompiled_charsmap": ""},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAA"}, {"type": "NFC"},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"}, {"type": "Prepend", "prepend": "_"},
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "a*"}, "content": "b"}]},
    ),
    "post_processor": (
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [],
         "special_tokens": {}},
        {"type": "BertProcessing", "sep": ["x", 0], "cls": ["y", 10**9]},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ),
    "decoder": (
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}, {"type": "ByteFallback"}, None,
        {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}, {"type": "Fuse"},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
    ),
    "truncation": ({"max_length": 0, "stride": 5, "strategy": "LongestFirst", "direction": "Right"},),
    "padding": ({"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"},),
    "model": (
        *(_BPE | {"continuing_subword_prefix": prefix} for prefix in ("#", "éé", "x" * 50)),
        {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False},
        {"type": "WordPiece", "unk_token": "no", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
         "vocab": {"a": 0, "no": 1}},
        {"type": "WordLevel", "unk_token": "no", "vocab": {"a": 0}},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def without_annotation_checks() -> Iterator[None]:
    """Errors are those of a user, whose annotations are not checked."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


# Files of settings and the tokenizer


def use_tokenizer(folder: Path) -> None:
    """Load the tokenizer, and take it over three texts and back."""
    tokenizer = Tokenizer.from_pretrained(folder)
    for text in ("", "def f(x):\n    return 'é🦜'", "]~!b[a[e~["):
        tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": M3Config.from_pretrained,
    "generation_config.json": Defaults.from_pretrained,
    "tokenizer_config.json": Tokenizer.from_pretrained,
    "tokenizer.json": use_tokenizer,
}


@st.composite
def other_parts(draw: st.DrawFn, original: dict) -> bytes:
    """A tokenizer.json in which one or two parts are others of `PARTS`, with further damage or without."""
    names = draw(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=2, unique=True))
    data = original | {name: draw(st.sampled_from(PARTS[name])) for name in names}
    return draw(damaged_json(data)) if draw(st.booleans()) else json.dumps(data).encode()


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_damaged_file_of_settings_is_a_usable_error(name, data):
    original = json.loads((embedded_path() / name).read_text(encoding="utf-8"))
    content = damaged_json(original) | other_parts(original) if name == "tokenizer.json" else damaged_json(original)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for other in READERS:
            shutil.copyfile(embedded_path() / other, folder / other)
        (folder / name).write_bytes(data.draw(content))
        outcome(lambda: READERS[name](folder))


# Checkpoints and drafts: each function damages a folder


def damage_json(name: str) -> Callable[[st.DrawFn, Path], None]:
    """Return a function that damages one JSON file."""

    def damage(draw: st.DrawFn, folder: Path) -> None:
        (folder / name).write_bytes(draw(damaged_json(json.loads((folder / name).read_text()))))

    return damage


def damage_sizes(draw: st.DrawFn, folder: Path) -> None:
    """Change sizes so that each is allowed, and together they ask for far more than the files hold."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    sizes = st.sampled_from(sorted(name for name, value in text.items() if isinstance(value, int)))
    for name in draw(st.lists(sizes, min_size=1, max_size=3, unique=True)):
        text[name] = draw(st.sampled_from((text[name] + 1, text[name] * 2, 4096, 100_000, 10**7, 2**31 - 1)))
    if draw(sometimes(30)):
        layers = draw(st.sampled_from((3, 60, 5000, 90_000)))
        freq = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, layers).tolist()
        text |= dict(num_hidden_layers=layers, moe_layer_freq=freq)
        text["sparse_attention_config"] |= dict(sparse_attention_freq=freq, sparse_disable_index_value=freq)
    (folder / "config.json").write_text(json.dumps(config))


def damage_index(draw: st.DrawFn, folder: Path) -> None:
    """Put names into the index that are not those of shards in the folder."""
    index = json.loads((folder / INDEX).read_text())
    tensors = st.sampled_from(sorted(index["weight_map"]))
    is_whole = draw(sometimes(30))
    for tensor in index["weight_map"] if is_whole else draw(st.lists(tensors, min_size=1, max_size=3, unique=True)):
        index["weight_map"][tensor] = draw(st.sampled_from(NAMES))
    (folder / INDEX).write_text(json.dumps(index))


def shard(draw: st.DrawFn, folder: Path) -> Path:
    """Draw one of the folder's files of weights."""
    return draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))


def damage_header(draw: st.DrawFn, folder: Path) -> None:
    """Write a header that is JSON, with other dtypes, shapes, offsets or names."""
    file = shard(draw, folder)
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = draw(damaged_json(json.loads(data[8 : 8 + size])))
    length = draw(st.sampled_from((0, 2**63, 10**9, len(header) // 2))) if draw(sometimes(10)) else len(header)
    file.write_bytes(length.to_bytes(8, "little") + header + data[8 + size :])


def damage_bytes(draw: st.DrawFn, folder: Path) -> None:
    """Cut, overwrite or double a piece of a file of weights."""
    file = shard(draw, folder)
    file.write_bytes(draw(damaged_bytes(file.read_bytes())))


def damage_values(draw: st.DrawFn, folder: Path) -> None:
    """Put a NaN or an infinity among the values."""
    file = shard(draw, folder)
    data = bytearray(file.read_bytes())
    start = len(data) - 2 * draw(st.integers(1, 200))
    data[start : start + 2] = np.uint16(draw(st.sampled_from((0x7FC0, 0x7F80, 0xFF80)))).tobytes()
    file.write_bytes(data)


def damage_files(draw: st.DrawFn, folder: Path) -> None:
    """Remove, swap or empty files, or replace them with folders or links."""
    names = sorted(os.listdir(folder))
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        file, kinds = folder / name, ("gone", "empty", "folder", "outside", "circle", "swapped")
        kind, data = draw(st.sampled_from(kinds)), file.read_bytes()
        file.unlink()
        if kind == "empty":
            file.write_bytes(b"")
        elif kind == "folder":
            file.mkdir()
        elif kind == "outside":
            (folder.parent / name).write_bytes(data)
            file.symlink_to(folder.parent / name)
        elif kind == "circle":
            file.symlink_to(name)
        elif kind == "swapped":
            other = folder / draw(st.sampled_from([other for other in names if other != name]))
            file.write_bytes(other.read_bytes() if other.is_file() else data)


DAMAGES = {
    "config.json": damage_json("config.json"),
    "header": damage_header,
    "bytes": damage_bytes,
    "files": damage_files,
}
OF_CHECKPOINTS = DAMAGES | {
    "sizes": damage_sizes,
    "index": damage_json(INDEX),
    "names in the index": damage_index,
    "values": damage_values,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint of three shards that is not damaged."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    save(init(CONFIG, 0), folder, max_shard_bytes=4500)
    return folder


@pytest.mark.parametrize("kind", OF_CHECKPOINTS)
@given(data=st.data(), check_finite=st.booleans())
def test_a_damaged_checkpoint_is_a_usable_error(kind, whole, data, check_finite):
    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(whole, Path(scratch) / "model")
        OF_CHECKPOINTS[kind](data.draw, folder)
        outcome(lambda: load(folder, progress=False, check_finite=check_finite))


@pytest.mark.parametrize("kind", DAMAGES)
@given(data=st.data())
def test_a_damaged_draft_is_a_usable_error(kind, data):
    target = M3Config.from_pretrained(embedded_path())
    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(embedded_draft_path(), Path(scratch) / "draft")
        DAMAGES[kind](data.draw, folder)
        outcome(lambda: load_draft(folder, target))


# The judge of errors
