"""What `make demo` prints: the embedded checkpoint writes Python with its draft, and recalls a key of long ago."""

import argparse
import inspect
import time

from rich.console import Console

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint import load_draft
from m3jax.decoding import Eagle3Drafter, Params, Sampling, engine_for
from m3jax.text import Tokenizer

CODE = "import os\nimport sys\n\n\nclass TestCase(unittest.TestCase):"
KEY, VALUE = "harbor", "lantern"


def main() -> None:
    """Load once, show both."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    console = Console(highlight=False)
    begin = time.perf_counter()
    model = m3jax.load(dtype="float32")
    tokenizer = Tokenizer.from_pretrained(embedded_path())
    console.print(f"[bold]loaded[/] in {time.perf_counter() - begin:.1f} s\n")

    console.rule("a continuation of Python source")
    ids = [model.config.bos_token_id, *tokenizer.encode(CODE)]
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=4)
    params = Params(max_new_tokens=96, sampling=sampling, stop_ids=model.config.eos_token_id)
    engine = engine_for(model, [ids], [params], draft=Eagle3Drafter(load_draft(None, model.config, "float32")))
    handle = engine.add(ids, params)
    new = engine.run()[handle].tokens
    print(CODE + tokenizer.decode(new) + "\n")
    print(f"{len(new)} tokens in {engine.drafting.forwards + 1} calls of the model: a draft proposes three tokens at a "
          "time, one call verifies them.\n")  # fmt: skip

    console.rule("a key recalled over thousands of tokens")
    prompt, distance = recall_prompt(tokenizer, model.config.bos_token_id)
    answer = tokenizer.decode(m3jax.generate(model, [prompt], max_new_tokens=1, temperature=0.0)[0])
    budget = model.config.index_topk_blocks * model.config.index_block_size
    print(f"# {KEY} -> {VALUE}\n... {distance} tokens of Python ...\n# {KEY} ->{answer}\n")
    print(f"A query reads {budget} tokens a layer; the index branch found the block that holds the key.")
    if answer.strip() != VALUE:
        raise SystemExit(f"expected {VALUE!r}, got {answer!r}")


def recall_prompt(tokenizer: Tokenizer, bos: int, length: int = 3500) -> tuple[list[int], int]:
    """A record, then the running Python's own `argparse` source, then the question."""
    record = tokenizer.encode(f"\n# {KEY} -> {VALUE}")
    filler = tokenizer.encode(inspect.getsource(argparse))[:length]
    question = tokenizer.encode(f"\n# {KEY} ->")
    return [bos, *record, *filler, *question], len(filler) + len(question)


if __name__ == "__main__":
    main()
