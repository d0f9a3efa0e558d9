"""The demo of `make demo`: the embedded model writes Python, calls a tool for a document's content, sees a picture."""

import argparse
import inspect
import json
import textwrap
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from tiny.pictures.draw import COLOURS, Shape, as_bytes, background, draw_shapes

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint import load_draft
from m3jax.completion import read_media
from m3jax.decoding import Eagle3Drafter, Engine, Params, Sampling, engine_for
from m3jax.model import M3
from m3jax.text import ChatTemplate, Tokenizer

CODE = "import os\nimport sys\n\n\nclass TestCase(unittest.TestCase):"

# Lines of the document, in order; what the tool alone knows; what is asked, and the right answer.
RECORDS = (("copper", "window"), ("harbor", "lantern"), ("orange", "button"), ("castle", "candle"),
           ("acorn", "bottle"), ("folder", "kite"), ("maze", "onion"), ("canoe", "pocket"))  # fmt: skip
VALUES = {"lantern": "clover"}
TASK, SOLVED = "Look up what harbor is.", "The value of harbor is lantern, and the value of lantern is clover."
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "the value of a key",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
DOCUMENT_TOKENS, ANSWER_TOKENS = 3000, 96

SHAPES = (Shape("circle", "green", 30.0, 34.0, 19.0), Shape("star", "blue", 84.0, 30.0, 20.0),
          Shape("square", "red", 78.0, 82.0, 17.0))  # fmt: skip
SCENE = "a picture of a green circle, a blue star and a red square"
QUESTIONS = (
    ("What colour is the circle?", "Green."),
    ("Which shape is blue?", "Star."),
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

    task = [{"role": "developer", "content": document(tokenizer)}, {"role": "user", "content": TASK}]
    longest = ChatTemplate.from_folder(embedded_path()).encode(tokenizer, task, tools=[LOOKUP])
    # One engine, with room for the longest of three examples, which run one after the other: a third of the programs.
    # Most prompts are short, and each would cost a whole call of the size that the longest one fills.
    room, picture = Params(max_new_tokens=3 * ANSWER_TOKENS, sampling=Sampling.greedy()), draw()
    draft = Eagle3Drafter(load_draft(None, model.config, "float32"))
    engine = engine_for(model, [longest], [room], prefill_chunk=512, media=[read_media([picture])], draft=draft)

    console.rule("a continuation of Python source")
    go_on(model, tokenizer, engine)
    console.print()
    console.rule("a tool called for what a document says")
    use_tool(console, model, tokenizer, engine, task)
    console.print()
    console.rule("questions about a picture")
    look(console, model, tokenizer, engine, picture)


def go_on(model: M3, tokenizer: Tokenizer, engine: Engine) -> None:
    """Print the beginning of a file and what the model makes of it."""
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=4)
    params = Params(max_new_tokens=96, sampling=sampling, stop_ids=model.config.eos_token_id)
    handle = engine.add([model.config.bos_token_id, *tokenizer.encode(CODE)], params)
    new = engine.run()[handle].tokens
    print(CODE + tokenizer.decode(new) + "\n")
    print(f"{len(new)} tokens in {engine.drafting.forwards + 1} calls of the model: a draft proposes three tokens at a "
          "time, one call verifies them.")  # fmt: skip


def document(tokenizer: Tokenizer) -> str:
    """The beginning of the running Python's own `textwrap`, with the records spread evenly between its lines."""
    code = tokenizer.encode(inspect.getsource(textwrap))[: DOCUMENT_TOKENS - 5 * len(RECORDS)]
    lines = tokenizer.decode(code).splitlines()
    step = len(lines) // len(RECORDS)
    for number, (key, value) in reversed(list(enumerate(RECORDS))):
        lines.insert(number * step + step // 2, f"# {key} -> {value}")
    return "\n".join(lines)


def use_tool(console: Console, model: M3, tokenizer: Tokenizer, engine: Engine, task: list[dict[str, Any]]) -> None:
    """Print a dialogue: the model finds a key in a document, has its value looked up, and says what came of it."""
    show = lambda who, text, style="": console.print(Text.assemble((f"{who:>9}  ", "bold"), (text, style)))
    text = task[0]["content"]
    tokens, back = (len(tokenizer.encode(part)) for part in (text, text[text.index("# harbor") :]))
    show("developer", f"({tokens:,} tokens of Python; {len(RECORDS)} of its lines are like # copper -> window)")
    show("user", TASK)
    dialogue, reply = list(task), None
    while reply is None or (reply.tool_calls and len(dialogue) < len(task) + 4):
        reply = m3jax.chat(
            model, tokenizer, dialogue, tools=[LOOKUP],
            stream=False, temperature=0, max_new_tokens=ANSWER_TOKENS, engine=engine,
        )  # fmt: skip
        dialogue.append(reply.message)
        if reply.reasoning:
            show("thinks", reply.reasoning, "dim")
        if reply.content:
            show("says", reply.content)
        for call in reply.tool_calls:
            show("calls", f"{call.name} {json.dumps(call.arguments)}", "cyan")
            key = call.arguments.get("key")
            result = f"# {key} -> {VALUES[key]}" if key in VALUES else f"no key {key}"
            show("tool", result, "cyan")
            dialogue.append({"role": "tool", "tool_call_id": call.id, "content": result})
    budget = model.config.index_topk_blocks * model.config.index_block_size
    print(f"\nThe line with harbor lies {back:,} tokens before the document's end, and in each layer but the first a")
    print(f"query reads at most {budget} tokens: the index branch found that line's block.")
    print(f"Of {reply.prompt_tokens:,} tokens before the last answer {reply.cached_tokens:,} were in the prefix cache.")
    print("This is one example: docs/tiny.md says how many such dialogues the model gets right.")
    if reply.content != SOLVED:
        raise SystemExit(f"expected {SOLVED!r}, got {reply.content!r}")


def look(console: Console, model: M3, tokenizer: Tokenizer, engine: Engine, picture: np.ndarray) -> None:
    """Show a picture, ask about it, print the answers."""
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


if __name__ == "__main__":
    main()
