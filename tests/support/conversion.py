"""A small dense model and documents on disk, and their conversion by plain descent, on one device or over many."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import optax
import pytest
from support import tiny

from m3jax.model import M3
from m3jax.train import convert_command
from m3jax.train.dense import dense_config, write_dense

QWEN3 = dict(
    model_type="qwen3", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=48, max_position_embeddings=128, rms_norm_eps=1e-5,
    rope_theta=300.0, tie_word_embeddings=False,
)  # fmt: skip
LENGTHS = (39, 57, 20, 31, 45)
# A step moves the weights by their gradients: AdamW's would be of the signs of what is rounding alone.
DESCENT = optax.sgd(0.1)


def dense_model(seed: int = 0, **changes) -> M3:
    """A random model without an index branch, whose layers are a Qwen3's."""
    return tiny.model(dense_config(QWEN3 | changes, dense_layers=QWEN3["num_hidden_layers"]), seed)


def write_source(folder: Path) -> None:
    """Write a Qwen3 to `folder`/qwen3, and documents to learn from to `folder`/documents.jsonl."""
    write_dense(dense_model(), folder / "qwen3")
    draw = np.random.default_rng(2)
    lines = [json.dumps({"tokens": draw.integers(0, 64, n).tolist()}) + "\n" for n in LENGTHS]
    (folder / "documents.jsonl").write_text("".join(lines), encoding="utf-8")


def convert(folder: Path, out: Path, mesh: str | None) -> None:
    """Convert what `write_source` wrote, in one step of each phase, as the command does on every process, silently."""
    words = f"--model {folder / 'qwen3'} --data {folder / 'documents.jsonl'} --out {out} --steps 2 --block-size 4"
    words += " --topk-blocks 2 --length 64 --rows 2 --held-out 2 --dtype float32 --no-remat"
    words += f" --mesh {mesh}" if mesh else ""
    args = convert_command.convert_parser("convert").parse_args(words.split())
    descend = mock.patch("m3jax.train.convert.make_optimizer", lambda *_, **__: DESCENT)
    with descend, mock.patch.object(convert_command, "say"):
        convert_command._convert(args, warm_up_steps=1)


def assert_same(found: tuple[list[dict], dict], expected: tuple[list[dict], dict]) -> None:
    """Fail unless two conversions told the same of each step, and measured the same before, between and after."""
    for one, other in zip(*(lines for lines, _ in (found, expected)), strict=True):
        assert one.pop("phase") == other["phase"]
        assert one == pytest.approx({name: x for name, x in other.items() if name != "phase"}, rel=1e-5)
    (_, measured), (_, wanted) = found, expected
    assert measured.keys() == wanted.keys() == {"before", "after_warm_up", "after"}
    for when in wanted:
        assert measured[when].keys() == wanted[when].keys()
        for name, value in wanted[when].items():
            np.testing.assert_allclose(measured[when][name], value, rtol=1e-5, err_msg=f"{name} {when}")


def told(out: Path) -> tuple[list[dict], dict]:
    """Return the lines of the metrics without times, and the report."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return [{name: x for name, x in line.items() if name != "seconds"} for line in lines], report
