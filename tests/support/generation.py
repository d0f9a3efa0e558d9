"""Small engines over a fake model, a tokenizer of letters, and a run of some prompts."""

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from m3jax.decoding import Engine, Generation, Params, Sampling, engine_for
from m3jax.text import Tokenizer

LETTERS = ["_", "<eos>"] + [chr(97 + i % 26) * (1 + i % 3) + str(i % 10) for i in range(62)]
WORDS = ["a", "<eos>", "\u00c3", "\u00a9", "EN", "D", "xE", "ND", "y", "abc", "ENx"]


def params(new: int = 12, stop_ids=(), **knobs) -> Params:
    return Params(max_new_tokens=new, sampling=Sampling(**knobs), stop_ids=tuple(stop_ids))


def small_engine(model, **options) -> Engine:
    """In the shapes that `generate` chooses for PROMPTS and up to 16 new tokens, so that both share programs."""
    shapes = dict(pages=64, max_batch=4, prefill_rows=4, prefill_chunk=64, max_length=1024, steps_per_call=64)
    return Engine(model, **shapes | options, max_stop_ids=4)


def engine_for_two(model, prompts: Sequence, params: Sequence[Params], **how) -> Engine:
    """`engine_for`, but a single prompt gets an engine for two: both shapes then share their programs."""
    missing = 2 - len(prompts)
    return engine_for(model, [*prompts, *prompts[:missing]], [*params, *params[:missing]], **how)


def run(engine: Engine, prompts: Sequence, *asked: Params) -> list[Generation]:
    """Serve all prompts, with params of each or the same for all."""
    asked *= len(prompts) // len(asked)
    handles = [engine.add(prompt, each) for prompt, each in zip(prompts, asked, strict=True)]
    results = engine.run()
    engine.check()
    return [results[handle] for handle in handles]


def tokens(results: Sequence[Generation]) -> list[list[int]]:
    return [result.tokens for result in results]


def tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, eos_id=1)
