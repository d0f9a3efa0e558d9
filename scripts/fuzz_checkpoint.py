"""Damages the files of small checkpoints and drafts at random, and counts what loading them gives.

As scripts/fuzz_config.py, for the weights and what goes with them: index, headers, shards, links,
sizes in config.json that the files do not hold, and drafts.

    python scripts/fuzz_checkpoint.py --seconds 60
"""

import atexit
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from fuzz_config import Case, damaged_bytes, damaged_json, main

from m3jax import M3Config
from m3jax.assets import embedded_draft_path, embedded_path
from m3jax.checkpoint import load, load_draft, save
from m3jax.model import init

INDEX = "model.safetensors.index.json"
CONFIG = M3Config(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    intermediate_size=8, dense_intermediate_size=24, shared_intermediate_size=8, num_local_experts=2,
    num_experts_per_tok=1, layer_types=("full_attention", "minimax_m3_sparse"), mlp_layer_types=("dense", "sparse"),
    rotary_dim=4, index_n_heads=1, index_head_dim=8, index_block_size=4, index_topk_blocks=2,
)  # fmt: skip
NAMES = ("../x.safetensors", "/etc/passwd", "a/b.safetensors", "x" * 300 + ".safetensors", "\0.safetensors",
         "config.json", "", ".", "..", "\x1b[2J.safetensors", INDEX, "model-00009-of-00003.safetensors")  # fmt: skip


@cache
def whole_folder() -> Path:
    """A checkpoint of three shards that is not damaged."""
    folder = Path(tempfile.mkdtemp(prefix="m3jax-fuzz-whole-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save(init(CONFIG, 0), folder, max_shard_bytes=4500)
    return folder


def _checkpoint(damage: Callable[[random.Random, Path], None]) -> Case:
    def make(draw: random.Random, folder: Path) -> Callable[[], object]:
        shutil.copytree(whole_folder(), folder, dirs_exist_ok=True)
        damage(draw, folder)
        return lambda: load(folder, progress=False, check_finite=draw.random() < 0.5)

    return make


def _draft(damage: Callable[[random.Random, Path], None]) -> Case:
    target = M3Config.from_pretrained(embedded_path())

    def make(draw: random.Random, folder: Path) -> Callable[[], object]:
        shutil.copytree(embedded_draft_path(), folder, dirs_exist_ok=True)
        damage(draw, folder)
        return lambda: load_draft(folder, target)

    return make


def _damage_json(name: str) -> Callable[[random.Random, Path], None]:
    def damage(draw: random.Random, folder: Path) -> None:
        (folder / name).write_bytes(damaged_json(draw, json.loads((folder / name).read_text())))

    return damage


def _damage_sizes(draw: random.Random, folder: Path) -> None:
    """Change sizes so that each is allowed, and together they ask for far more than the files hold."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    for name in draw.sample(sorted(name for name, value in text.items() if isinstance(value, int)), draw.randint(1, 3)):
        text[name] = draw.choice((text[name] + 1, text[name] * 2, 4096, 100_000, 10**7, 2**31 - 1))
    if draw.random() < 0.3:
        layers = draw.choice((3, 60, 5000, 90_000))
        freq = [draw.randint(0, 1) for _ in range(layers)]
        text |= dict(num_hidden_layers=layers, moe_layer_freq=freq)
        text["sparse_attention_config"] |= dict(sparse_attention_freq=freq, sparse_disable_index_value=freq)
    (folder / "config.json").write_text(json.dumps(config))


def _damage_index(draw: random.Random, folder: Path) -> None:
    """Put names into the index that are not those of shards in the folder."""
    index = json.loads((folder / INDEX).read_text())
    for name in draw.sample(sorted(index["weight_map"]), draw.choice((1, 3, len(index["weight_map"])))):
        index["weight_map"][name] = draw.choice(NAMES)
    (folder / INDEX).write_text(json.dumps(index))


def _damage_header(draw: random.Random, folder: Path) -> None:
    """A header that is JSON, with other dtypes, shapes, offsets or names."""
    file = draw.choice(sorted(folder.glob("*.safetensors")))
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = damaged_json(draw, json.loads(data[8 : 8 + size]))
    length = len(header) if draw.random() < 0.9 else draw.choice((0, 2**63, 10**9, len(header) // 2))
    file.write_bytes(length.to_bytes(8, "little") + header + data[8 + size :])


def _damage_bytes(draw: random.Random, folder: Path) -> None:
    file = draw.choice(sorted(folder.glob("*.safetensors")))
    file.write_bytes(damaged_bytes(draw, file.read_bytes()))


def _damage_values(draw: random.Random, folder: Path) -> None:
    """Put NaN and infinities among the values, which load unless they are looked for."""
    file = draw.choice(sorted(folder.glob("*.safetensors")))
    data = bytearray(file.read_bytes())
    start = len(data) - 2 * draw.randint(1, 200)
    data[start : start + 2] = np.uint16(draw.choice((0x7FC0, 0x7F80, 0xFF80))).tobytes()
    file.write_bytes(data)


def _damage_files(draw: random.Random, folder: Path) -> None:
    """Remove, swap or empty files, or replace them by folders or links."""
    names = sorted(os.listdir(folder))
    for name in draw.sample(names, draw.randint(1, 2)):
        file = folder / name
        kind = draw.choice(("gone", "empty", "folder", "outside", "circle", "swapped"))
        data = file.read_bytes()
        file.unlink()
        if kind == "empty":
            file.write_bytes(b"")
        elif kind == "folder":
            file.mkdir()
        elif kind == "outside":
            file.symlink_to(whole_folder() / name)
        elif kind == "circle":
            file.symlink_to(name)
        elif kind == "swapped":
            other = folder / draw.choice([other for other in names if other != name])
            file.write_bytes(other.read_bytes() if other.is_file() else data)


CASES: dict[str, Case] = {
    "config.json": _checkpoint(_damage_json("config.json")),
    "config.json, sizes": _checkpoint(_damage_sizes),
    "index": _checkpoint(_damage_json(INDEX)),
    "index, names": _checkpoint(_damage_index),
    "header": _checkpoint(_damage_header),
    "bytes": _checkpoint(_damage_bytes),
    "values": _checkpoint(_damage_values),
    "files": _checkpoint(_damage_files),
    "draft, config.json": _draft(_damage_json("config.json")),
    "draft, header": _draft(_damage_header),
    "draft, bytes": _draft(_damage_bytes),
    "draft, files": _draft(_damage_files),
}

if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], CASES))
