"""What `make demo` prints: the embedded checkpoint writes Python with its draft, recalls a key, looks at a picture."""

import argparse
import inspect
import time

import numpy as np
from rich.console import Console
from rich.text import Text

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint import load_draft
from m3jax.decoding import Eagle3Drafter, Engine, Params, Sampling, engine_for, read_media
from m3jax.model import M3
from m3jax.text import Tokenizer
from m3jax.train.pictures.draw import COLOURS, Shape, as_bytes, background, draw_shapes

CODE = "import os\nimport sys\n\n\nclass TestCase(unittest.TestCase):"
KEY, VALUE = "harbor", "lantern"
SHAPES = (Shape("circle", "green", 30.0, 34.0, 19.0), Shape("star", "blue", 84.0, 30.0, 20.0),
          Shape("square", "red", 78.0, 82.0, 17.0))  # fmt: skip
SCENE = "a picture of a green circle, a blue star and a red square"
QUESTIONS = (
    ("What colour is the circle?", "Green."),
    ("How many shapes are there?", "3."),
    ("Where is the square?", "Bottom right."),
)


def main() -> None:
    """Load once, show all."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    console = Console(highlight=False)
    begin = time.perf_counter()
    model = m3jax.load(dtype="float32")
    tokenizer = Tokenizer.from_pretrained(embedded_path())
    console.print(f"[bold]loaded[/] in {time.perf_counter() - begin:.1f} s\n")

    code = [model.config.bos_token_id, *tokenizer.encode(CODE)]
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=4)
    code_params = Params(max_new_tokens=96, sampling=sampling, stop_ids=model.config.eos_token_id)
    recall, distance = recall_prompt(tokenizer, model.config.bos_token_id)
    recall_params = Params(max_new_tokens=1, sampling=Sampling.greedy())
    # One engine, which has room for the longer of the two, one after the other: half of the programs of two engines.
    draft = Eagle3Drafter(load_draft(None, model.config, "float32"))
    picture, seen = draw(), []
    if model.vision is not None:
        seen = [read_media([picture])]
    engine = engine_for(model, [recall], [code_params], media=seen, draft=draft)

    console.rule("a continuation of Python source")
    new = generate(engine, code, code_params)
    print(CODE + tokenizer.decode(new) + "\n")
    print(f"{len(new)} tokens in {engine.drafting.forwards + 1} calls of the model: a draft proposes three tokens at a "
          "time, one call verifies them.\n")  # fmt: skip

    console.rule("a key recalled over thousands of tokens")
    answer = tokenizer.decode(generate(engine, recall, recall_params))
    budget = model.config.index_topk_blocks * model.config.index_block_size
    print(f"# {KEY} -> {VALUE}\n... {distance} tokens of Python ...\n# {KEY} ->{answer}\n")
    print(f"A query reads {budget} tokens a layer; the index branch found the block that holds the key.")
    if answer.strip() != VALUE:
        raise SystemExit(f"expected {VALUE!r}, got {answer!r}")
    if model.vision is not None:
        look(console, model, tokenizer, engine, picture)


def look(console: Console, model: M3, tokenizer: Tokenizer, engine: Engine, picture: np.ndarray) -> None:
    """Show a picture, ask about it, print the answers."""
    console.print()
    console.rule("questions about a picture")
    console.print(half_blocks(picture) if console.color_system else f"({SCENE}; a terminal with colours shows it)")
    for question, expected in QUESTIONS:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        answer = m3jax.chat(
            model, tokenizer, [{"role": "user", "content": content}],
            thinking_mode="disabled", stream=False, temperature=0, max_new_tokens=16, engine=engine,
        ).content  # fmt: skip
        print(f"{question} {answer}")
        if answer != expected:
            raise SystemExit(f"expected {expected!r}, got {answer!r}")


def draw() -> np.ndarray:
    """112 x 112 pixels: 64 patches of 14 x 14, which become 16 tokens."""
    rng = np.random.default_rng(0)
    canvas = background(rng, 112, 112, level=215.0)
    return as_bytes(rng, draw_shapes(canvas, SHAPES, [np.array(COLOURS[shape.colour], float) for shape in SHAPES]), 2.0)


def half_blocks(picture: np.ndarray, step: int = 3) -> Text:
    """A picture in characters of two pixels each, one above the other.

    Args:
      picture: uint8 [H W 3].
      step: of so many rows and columns one is shown.
    """
    rows = picture[::step, ::step]
    colour = lambda pixel: "#{:02x}{:02x}{:02x}".format(*pixel)
    text = Text()
    for upper, lower in zip(rows[0::2], rows[1::2], strict=False):
        for top, bottom in zip(upper, lower, strict=True):
            text.append("\u2580", style=f"{colour(top)} on {colour(bottom)}")
        text.append("\n")
    return text


def generate(engine: Engine, prompt: list[int], params: Params) -> list[int]:
    """The new tokens of a prompt."""
    handle = engine.add(prompt, params)
    return engine.run()[handle].tokens


def recall_prompt(tokenizer: Tokenizer, bos: int, length: int = 3500) -> tuple[list[int], int]:
    """A record, then the running Python's own `argparse` source, then the question."""
    record = tokenizer.encode(f"\n# {KEY} -> {VALUE}")
    filler = tokenizer.encode(inspect.getsource(argparse))[:length]
    question = tokenizer.encode(f"\n# {KEY} ->")
    return [bos, *record, *filler, *question], len(filler) + len(question)


if __name__ == "__main__":
    main()
