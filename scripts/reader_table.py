"""Measures what a reader of the model meets: frames, calls and files between a call and its products.

    python scripts/reader_table.py

A small model (one dense layer, three sparse ones with experts) is traced on a CPU, without a cache, as `model(ids)`.
Frames and calls are those of functions in m3jax, lambdas and comprehensions among them. A layer's calls are those while
one layer of its stack is traced.
"""

import argparse
import os
import re
import sys
from pathlib import Path

WAYS = re.compile(
    r"\b(token_tile|is_ordered|is_tiled|is_invariant|in_place|InPlace|StackedLayer|MXFP8Array|by_tiles|backend|mesh|"
    r"tiles?|[Tt]aps|tapped)\b"
)
ROUTE = ("spec/msa.py", "spec/model.py")
HOW = ("model/layers.py", "model/attention.py", "model/moe.py", "model/decoder.py", "model/m3.py")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp

    import m3jax
    from m3jax.model.attention import Attention
    from m3jax.model.decoder import Decoder

    root = Path(m3jax.__file__).parent
    model, ids = m3jax.init(m3jax.M3Config.tiny()), jnp.zeros((1, 64), jnp.int32)
    trace = lambda: jax.make_jaxpr(lambda model, ids: model(ids))(model, ids)
    trace()  # imports, and what is looked up once
    jax.clear_caches()
    events = _events(root, trace)

    depth = next(event["depth"] for event in events if event["kind"] == "product")
    print(f"frames from model(ids) to its first product          {depth}")
    layer = _spans(events, Decoder.__call__.__code__)[-1]
    attention = _spans(layer, Attention.__call__.__code__)[0]
    measured = {"one sparse attention layer, traced": attention, "a sparse decoder layer with experts": layer}
    for name, span in measured.items():
        calls = [event for event in span if event["kind"] == "call"]
        files = {event["file"] for event in calls}
        functions = {event["code"] for event in calls}
        print(f"{name:52} {len(calls)} calls of {len(functions)} functions in {len(files)} files")

    count = lambda names: sum(len((root / name).read_text(encoding="utf-8").splitlines()) for name in names)
    print(f"lines of the two definitions, docstrings included     {count(ROUTE)}")
    print(f"lines of the Flax model behind them                   {count(HOW)}")
    files = sorted((root / "model").glob("*.py"))
    mentions = {path.name: sum(bool(WAYS.search(line)) for line in _code(path)) for path in files}
    print(f"code lines of model/ that name a way to compute       {sum(mentions.values())}")
    print("   " + ", ".join(f"{name} {number}" for name, number in mentions.items() if number))


def _events(root: Path, run) -> list[dict]:
    """Return the calls and returns of functions in m3jax, and the first product, in order."""
    events, stack = [], []

    def profile(frame, event, argument):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(str(root)):
            stack.append(frame)
            events.append({"kind": "call", "code": frame.f_code, "file": file, "depth": len(stack)})
        elif event == "return" and stack and stack[-1] is frame:
            stack.pop()
            events.append({"kind": "return", "code": frame.f_code, "file": file, "depth": len(stack) + 1})
        elif event == "call" and name == "einsum" and "jax" in file:
            events.append({"kind": "product", "code": None, "file": file, "depth": len(stack)})

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return events


def _spans(events: list[dict], code) -> list[list[dict]]:
    """Return the events inside each call of a function, beginning with that call."""
    spans = []
    for start, event in enumerate(events):
        if event["kind"] == "call" and event["code"] is code:
            end = next(
                i for i in range(start, len(events))
                if events[i]["kind"] == "return" and events[i]["depth"] == event["depth"]
            )  # fmt: skip
            spans.append(events[start : end + 1])
    return spans


def _code(path: Path) -> list[str]:
    """Return a file's lines without docstrings and comments."""
    text = re.sub(r'"""[\s\S]*?"""', "", path.read_text(encoding="utf-8"))
    return [line.split("#")[0] for line in text.splitlines() if line.split("#")[0].strip()]


if __name__ == "__main__":
    main()
