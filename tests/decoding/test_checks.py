"""What an engine refuses of sizes and of requests, each at its limit: the last that passes, the first that fails."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.fake_model import FakeModel

from m3jax import model as m3_model
from m3jax.decoding import Params, Sampling, Storage, Work
from m3jax.decoding.engine import checks
from m3jax.decoding.engine.request import check_ids
from m3jax.decoding.engine.shapes import Shapes
from m3jax.messages import shown

pytestmark = pytest.mark.usefixtures("unchecked")
CONFIG = tiny.config("dM")  # a context of 1,024 tokens, blocks of 8, three of them kept
SHAPES = Shapes(batch=2, prompts=2, chunks=(8, 16), steps=4, stop_ids=2, biases=1, bad_words=1, top_logprobs=5)


def params(new: int = 4, **changes) -> Params:
    sampling = {name: changes.pop(name) for name in ("logit_bias", "bad_words") if name in changes}
    return Params(max_new_tokens=new, sampling=Sampling(**sampling), **changes)


def refusal(call, *arguments, **options) -> str:
    """The error of a call; nothing where it passes."""
    try:
        call(*arguments, **options)
    except ValueError as error:
        return str(error)
    return ""


def test_sizes_up_to_their_limits():
    assert not refusal(checks.check_sizes, {"a": 1, "b": np.int64(1)}) and not refusal(checks.check_sizes, {"a": 0}, 0)
    assert refusal(checks.check_sizes, {"a": 1, "b": 0}) == "b = 0: must be an integer of at least 1"
    assert refusal(checks.check_sizes, {"a": -1}, 0) == "a = -1: must be an integer of at least 0"
    assert checks.chunk_sizes(5) == (5,) and checks.chunk_sizes([16, 8]) == (8, 16)
    assert not refusal(checks.check_warmup, ("prefill",), 1)
    assert checks.check_max_length(None, 3, CONFIG) == 24 and checks.check_max_length(None, 200, CONFIG) == 1024
    assert checks.check_max_length(24, 3, CONFIG) == 24 and checks.check_max_length(1024, 128, CONFIG) == 1024
    asked = refusal(checks.check_max_length, 25, 3, CONFIG)
    assert asked == "max_length = 25: at most 24 (3 pages of 8 tokens)"
    assert "at most 1024 (the model's context)" in refusal(checks.check_max_length, 1025, 200, CONFIG)
    assert "at most 1024 (128 pages of 8 tokens)" in refusal(checks.check_max_length, 1025, 128, CONFIG)


def test_sizes_of_decode_calls_are_below_the_largest():
    """Ascending and each once; on a mesh there is one size."""
    one_device, meshed = SimpleNamespace(mesh=None), SimpleNamespace(mesh=object())
    assert checks.decode_sizes((), 1, meshed) == () and checks.decode_sizes((3, 1, 3), 4, one_device) == (1, 3)
    for rows, batch, model, message in (
        ((1, 0), 4, one_device, "decode_rows[1] = 0: must be an integer of at least 1"),
        ((True,), 4, one_device, "decode_rows[0] = True: must be an integer"),
        ((1, 4), 4, one_device, "decode_rows has 4: must be below max_batch, which is 4"),
        ((1,), 4, meshed, "decode_rows on a mesh: leave it out"),
    ):
        assert message in refusal(checks.decode_sizes, rows, batch, model)


def test_calls_are_launched_ahead_where_that_changes_nothing(monkeypatch):
    for platform, by_default in (("cpu", False), ("gpu", True), ("tpu", True)):
        monkeypatch.setattr(checks, "platform", lambda platform=platform: platform)
        assert checks.check_dispatch_ahead(None, None) is by_default
        assert checks.check_dispatch_ahead(None, 4) is checks.check_dispatch_ahead(False, 4) is False
        assert checks.check_dispatch_ahead(True, None) is True
    assert "dispatch_ahead with device_pages" in refusal(checks.check_dispatch_ahead, True, 4)
    assert "dispatch_ahead = 2: must be True, False or None" in refusal(checks.check_dispatch_ahead, 2, None)


def test_a_request_may_use_up_all_that_there_is_room_for():
    """And not one token, stop id, bias, bad word or alternative more."""
    full = params(4, stop_ids=(1, 2), logit_bias={1: 1.0}, bad_words=[(1,)], top_logprobs=5, prompt_logprobs=5)
    assert not refusal(checks.check_room, (1, 2, 3), full, 7, SHAPES)
    for changes, message in (
        (dict(max_new_tokens=5), "a prompt of 3 tokens with max_new_tokens = 5 needs room for 8 tokens"),
        (dict(max_new_tokens=5), "and a request of this engine can have 7"),
        (dict(stop_ids=(1, 2, 3)), "3 stop ids: this engine takes 2 (max_stop_ids)"),
        (dict(sampling=Sampling(logit_bias={1: 1.0, 2: 1.0})), "2 tokens: there is room for 1 (max_biases)"),
        (dict(sampling=Sampling(bad_words=[(1,), (2,)])), "bad_words has 2 words: there is room for 1"),
        (dict(top_logprobs=6), "top_logprobs = 6: this engine gives 5 (max_top_logprobs)"),
        (dict(prompt_logprobs=6), "prompt_logprobs = 6: this engine gives 5"),
        (dict(top_logprobs=6, prompt_logprobs=7), "top_logprobs = 6"),
    ):  # fmt: skip
        assert message in refusal(checks.check_room, (1, 2, 3), replace(full, **changes), 7, SHAPES)
    least = replace(SHAPES, stop_ids=0, biases=0, bad_words=0, top_logprobs=0)
    for asked in (params(4), params(4, top_logprobs=0, prompt_logprobs=0)):  # who asks for none needs no room
        assert not refusal(checks.check_room, (1, 2, 3), asked, 7, least)
    assert not refusal(checks.check_goes_on, (1, 2, 3), full, "it")
    assert refusal(checks.check_goes_on, (1, 2, 3, 4), full, "it") == "max_new_tokens = 4: it has 4 already"


def test_ids_are_integers_of_the_vocabulary():
    """The first that is none is named, wherever it stands among how many others."""
    for ids in ((), (0,), (63,), (0, 63, 5), (np.int32(0), np.int64(63)), [7] * 1000):
        assert not refusal(check_ids, "prompt", ids, 64)
    for wrong in (-1, 64, True, 1.0, np.float32(1), "1", None):
        for ids in ((wrong,), (0, wrong, -5), (np.int32(1), wrong)):
            expected = f"prompt: {shown(wrong)} is no token id; they are integers from 0 to 63"
            assert refusal(check_ids, "prompt", ids, 64) == expected


def test_groups_priorities_and_deadlines():
    for given in ((None, 0, None), (1, -3, 0.001), (2, np.int64(7), 5)):
        assert not refusal(checks.check_order, *given)
    for given, message in (
        ((0, 0, None), "n = 0: must be an integer of at least 1"),
        *[((1, number, None), f"priority = {number}: must be an integer") for number in (True, 1.0)],
        *[((1, 0, deadline), f"deadline = {deadline!r}: must be a number of seconds above 0")
          for deadline in (0, -1.0, float("inf"), float("nan"), True, "1")],
    ):  # fmt: skip
        assert message in refusal(checks.check_order, *given)


def test_a_model_in_place_of_another_has_its_parameters():
    """All of them and no other, of the same shape, dtype and device, computed in the same way."""
    model = FakeModel.random()
    of = lambda **changes: refusal(checks.check_same_shapes, model, replace(model, **changes))
    assert not of() and not of(head=model.head + 1)
    assert of(embed=None) == "the new model lacks the parameter .embed: make a new engine"
    lacking = replace(model, head=None)
    message = "the new model has a parameter .head that the engine's model lacks: make a new engine"
    assert refusal(checks.check_same_shapes, lacking, model) == message
    found = of(head=jnp.zeros((3, 2), jnp.bfloat16))
    assert found.startswith("parameter .head of the new model is bfloat16 (3, 2), and the engine's is float32 (64, 16)")
    for other in (jnp.zeros((3, 2)), model.head.astype(jnp.bfloat16)):
        assert "parameter .head of the new model is" in of(head=other)
    assert "the new model is computed in another way" in of(config=replace(model.config, index_topk_blocks=3))
    assert "model is a int, which an engine cannot serve" in refusal(checks.check_same_shapes, model, 3)
    if jax.device_count() > 1:
        elsewhere = jax.device_put(model.embed, jax.devices()[1])
        assert "parameter .embed of the new model lies on other devices" in of(embed=elsewhere)


def test_a_pool_has_room_for_the_pages_of_a_call():
    """Two rows that select three blocks and write up to four tokens, over two pages; two chunks of 16, over three."""
    model = m3_model.abstract(CONFIG)
    decode, prefill = 2 * (3 + 2 - 1), 2 * 3 + 1
    assert not refusal(checks.check_device_pages, decode, model, SHAPES)
    expected = f"a decode call of 2 rows can need {decode} pages at once and a prefill call {prefill}; give {decode} or"
    assert expected in refusal(checks.check_device_pages, decode - 1, model, SHAPES)
    longer = replace(SHAPES, chunks=(8, 25), steps=1)  # of 25 tokens the last can be the second of a fifth page
    assert "can need 6 pages at once and a prefill call 9; give 9" in refusal(
        checks.check_device_pages, 8, model, longer
    )
    assert not refusal(checks.check_device_pages, 9, model, longer)


def test_a_draft_proposes_as_many_tokens_as_there_is_room_for():
    drafter = SimpleNamespace(check=lambda model: None)
    for count in (1, 8):
        assert not refusal(checks.check_draft, drafter, count, None, None)
    assert refusal(checks.check_draft, drafter, 9, None, None) == "draft_tokens = 9: at most 8"
    assert "draft_tokens = 0: must be" in refusal(checks.check_draft, drafter, 0, None, None)
    assert "device_pages with a draft" in refusal(checks.check_draft, drafter, 1, None, 4)


def test_the_tower_s_sizes_and_its_features():
    seeing = SimpleNamespace(vision=object())
    sizes = lambda patches, tokens=None: checks.media_sizes(patches, tokens, seeing, SHAPES)
    assert sizes((16, 8)) == ((8, 16), 16384) and sizes(8) == ((8,), 16384) and sizes(()) == ((), 0)
    assert sizes(None) == ((256, 1024, 2304, 12288), 16384)
    needed = 16 + 4 * 4  # a chunk of the prompt, and four segments of 16 patches
    assert sizes(16, needed) == ((16,), needed)
    assert f"can need {needed} features" in refusal(sizes, 16, needed - 1)
    assert sizes(1 << 16) == ((1 << 16,), 16 + (1 << 16))  # more than by default, where a call needs more
    assert "media_patches = 6: a feature has 4 patches" in refusal(sizes, (8, 6))
    blind = SimpleNamespace(vision=None)
    assert "the model has no vision tower" in refusal(checks.media_sizes, 8, None, blind, SHAPES)


def test_options_are_checked_when_they_are_made():
    assert not refusal(Work, max_biases=0, max_bad_words=0, max_top_logprobs=0, max_batch=1, steps_per_call=1)
    for name in ("max_batch", "prefill_rows", "steps_per_call", "max_stop_ids"):
        assert f"{name} = 0: must be an integer of at least 1" in refusal(Work, **{name: 0})
    for name in ("max_biases", "max_bad_words", "max_top_logprobs"):
        assert f"{name} = -1: must be an integer of at least 0" in refusal(Work, **{name: -1})
    assert not refusal(Work, max_top_logprobs=20)
    assert "max_top_logprobs = 21: at most 20" in refusal(Work, max_top_logprobs=21)
    for name in ("pages", "max_length", "device_pages"):
        assert f"{name} = 0: must be" in refusal(Storage, **({"pages": 1} | {name: 0}))
