"""An engine of plain Python for both ends of a transfer, and a receiver that takes frames as they are sent."""

import threading
from argparse import Namespace

import jax
import numpy as np

from m3jax.transfer import PageReceiver
from m3jax.transfer.frames import Frame, encode

P, GROUP, HEADS = 4, 2, 3  # tokens of a page; pages of a call; heads
SHAPE, INDEX_SHAPE = (2, GROUP, HEADS, P, 5), (2, GROUP, P, 6)  # [L C K P H], [L C P I]
LAYOUT = [tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in (SHAPE, SHAPE, INDEX_SHAPE))]
IDENTITY = {"config": {"width": 5}}
TRANSFER = "aa" * 8


def scores_of(tokens):
    """Entries of `Generation.prompt_logprobs`, of one alternative."""
    return [{99: -0.5, token: -1.0 - token} for token in tokens]


class PlainEngine:
    """What a prefiller asks of an engine. It reads eight tokens of every prompt a call, and says that it knew one."""

    def __init__(self):
        self.config, self.identity, self.page_layout = Namespace(index_block_size=P), IDENTITY, LAYOUT
        self.prompts, self.progress, self.reasons, self.calls = {}, {}, {}, []
        self.may_read = threading.Event()
        self.may_read.set()
        self.error = None

    def add(self, prompt, params, media=None):
        if min(prompt) < 0:
            raise ValueError("no token id")
        assert params.max_new_tokens == 2 and params.sampling.temperature == 0
        handle = len(self.prompts)
        self.prompts[handle], self.progress[handle], self.reasons[handle] = prompt, 0, "unfinished"
        return handle

    def prefill(self, decode_follows=True):
        self.calls.append(("prefill", decode_follows))
        self.may_read.wait(10)
        if self.error:
            raise self.error
        for handle, reason in self.reasons.items():
            if reason == "unfinished":
                self.progress[handle] = min(self.progress[handle] + 8, len(self.prompts[handle]))
        return any(self.progress[i] < len(self.prompts[i]) for i, r in self.reasons.items() if r == "unfinished")

    def export_pages(self, handle, first):
        if 9999 in self.prompts[handle]:
            raise ValueError("it has ended")
        done, length = self.progress[handle], len(self.prompts[handle])
        count = min(-(-done // P) if done == length else done // P, first + GROUP) - first
        k = np.zeros(SHAPE, np.float32)
        k += np.arange(first, first + GROUP, dtype=np.float32)[:, None, None, None]
        index_k = np.zeros(INDEX_SHAPE, np.float32) + np.arange(2, dtype=np.float32)[:, None, None, None]
        self.calls.append(("export", handle, first, count))
        return count, [(k, -k, index_k)]

    def prompt_logprobs(self, handle, first=0):
        return scores_of(self.prompts[handle][1 : self.progress[handle] + 1])[first:]

    def prompt_progress(self, handle):
        return 1, self.progress[handle]

    def reason(self, handle):
        return self.reasons[handle]

    def abort(self, handle):
        assert self.reasons[handle] == "unfinished"
        self.reasons[handle] = "aborted"

    def forget(self, handle):
        del self.reasons[handle]


def received(frames: list[Frame], num_tokens: int = 11, left_out: int = 0, scored=()) -> tuple[PageReceiver, list[str]]:
    """Return a receiver that has taken the frames, and the kinds of these."""
    receiver = PageReceiver(TRANSFER, num_tokens, LAYOUT, P, IDENTITY, "host:1", left_out, scored)
    return receiver, [receiver.take(encode(frame, TRANSFER, number)) for number, frame in enumerate(frames)]
