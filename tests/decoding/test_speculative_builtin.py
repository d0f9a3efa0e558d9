"""The embedded checkpoint with its own draft, and the command line."""

import json
import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from support.engines import runner_of

import m3jax
from m3jax import cli
from m3jax.assets import embedded_draft_path, embedded_path
from m3jax.checkpoint import load_draft
from m3jax.decoding import Eagle3Drafter, Engine, Params, Sampling
from m3jax.decoding.speculation.named import as_drafter
from m3jax.evaluate.sources import python_corpus
from m3jax.text import Tokenizer

NEW = 40
# Those of notebooks/03_speculative.ipynb, so that one of the two finds the other's programs in the compilation cache.
SHAPES = dict(pages=64, max_batch=4, prefill_chunk=64, max_length=256, steps_per_call=1, draft_tokens=3)


@cache
def target():
    return m3jax.load(dtype="float32")


@cache
def prompts():
    """Code of four files that training did not see (docs/tiny.md)."""
    tokenizer = Tokenizer.from_pretrained(embedded_path())
    texts = [text for _, text in sorted(python_corpus("validation").items()) if len(text) > 4000]
    return tuple(tuple(tokenizer.encode(text[2000:4000])[:128]) for text in texts[:4])


def run(drafter, forgets: bool):
    """Tokens of all prompts, one in each row, and what came of the drafts."""
    served = Engine(target(), **SHAPES, draft=drafter)
    handles = [served.add(prompt, Params(max_new_tokens=NEW, sampling=Sampling.greedy())) for prompt in prompts()]
    while served.prefill():
        pass
    if forgets:  # the draft begins where the prompt ends: its pages lack the prompt
        runner = runner_of(served)
        state = runner.state
        draft = jax.tree.map(jnp.zeros_like, state.cache.draft).replace(scales=state.cache.draft.scales)
        runner.state = replace(state, cache=state.cache.replace(draft=draft))
    results = served.run()
    return [results[handle].tokens for handle in handles], served.drafting


@pytest.mark.further
def test_the_draft_pays_and_needs_the_whole_prompt():
    """More than 2.2 tokens a call of the model; without what the draft made of the prompt fewer are accepted.

    That the tokens are those without a draft is seen of random models in test_speculative.py.
    """
    drafter = Eagle3Drafter(load_draft(None, target().config, "float32"))
    tokens, done = run(drafter, forgets=False)
    same, less = run(drafter, forgets=True)
    assert tokens == same
    assert done.mean_length > 2.2
    assert list(done.acceptance) == sorted(done.acceptance, reverse=True)
    assert less.mean_length < done.mean_length - 0.1


@pytest.mark.parametrize(
    "name", ["builtin", embedded_draft_path(), str(embedded_draft_path())], ids=["name", "path", "text"]
)
def test_a_draft_by_its_name_is_loaded_like_its_target(name):
    drafter = as_drafter(name, target())
    assert isinstance(drafter, Eagle3Drafter)
    assert drafter.draft.dtype == target().dtype == "float32"
    assert as_drafter(drafter, target()) is drafter and as_drafter(None, target()) is None


# The command line

ARGS = ["--prompt", "import os\nimport sys\n\n\ndef main(", "--temperature", "0", "--max-new-tokens", "40"]


def generate(capsys, *more):
    status = cli.main([*ARGS, "--dtype", "float32", "--json", *more])
    out, err = capsys.readouterr()
    return status, out and json.loads(out)["token_ids"], err


@pytest.mark.further  # its drafts: the tests above
def test_drafts_on_the_command_line(capsys):
    status, tokens, err = generate(capsys, "--draft", "builtin", "--draft-tokens", "4", "--stats")
    assert (status, len(tokens)) == (0, 40)
    (line,) = [line for line in err.splitlines() if line.startswith("draft:")]
    assert re.match(r"draft: accepted by position( \d+\.\d%,?){4}; mean length \d\.\d\d; \d\.\d\d tokens a call", line)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--draft", "ngram", "--draft-tokens", "9"], "--draft-tokens 9: give 1 to 8"),
        (["--draft", "nowhere"], "no config.json; give a folder of an EAGLE3 draft"),
        (["--draft", str(embedded_path())], "unsupported draft: "),
    ],
)
def test_bad_drafts_on_the_command_line(capsys, more, message):
    status, _, err = generate(capsys, *more)
    assert status == 2
    assert message in err and len(err.splitlines()) == 1
