"""Pictures that reach a worker as tensors: the model sees what it sees when the engine is given them."""

import asyncio
import re
from collections import Counter
from contextlib import aclosing

import ml_dtypes
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from smg_grpc_proto import vllm_engine_pb2 as protocol
from smg_grpc_proto.generated import common_pb2
from support.embedded import TOKENIZER
from support.media import noise_patches
from support.workers import answers, collect, engine_alone, generate_request, settled, shared_worker

from m3jax.decoding import Media
from m3jax.serve.worker.tensors import MediaReader

IMAGE, VIDEO, START, END = map(
    TOKENIZER.backend.token_to_id, ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
)
SQUARE = noise_patches((1, 4, 4), 1)  # 16 patches, 4 features
WIDE = noise_patches((1, 2, 8), 2)
CLIP = noise_patches((6, 2, 4), 3)  # longer than the four temporal patches of a chunk


def tensor(array, dtype=None) -> protocol.TensorData:
    return protocol.TensorData(shape=array.shape, dtype=dtype or str(array.dtype), inline=array.tobytes())


def batch(*items, modality="image", **fields) -> protocol.MultimodalInputs:
    """Return pictures as SMG sends them: patches one behind the other, a grid each."""
    patches = np.concatenate([patches for patches, _ in items]).astype(np.float32)
    grids = np.array([grid for _, grid in items], np.int64)
    return protocol.MultimodalInputs(
        pixel_values=tensor(patches),
        model_specific_tensors={
            f"{modality}_grid_thw": tensor(grids),
            f"patches_per_{modality}": tensor(np.array([len(patches) for patches, _ in items], np.int64)),
        },
        modality={"image": common_pb2.IMAGE, "video": common_pb2.VIDEO}[modality],
        **fields,
    )


def seen(features: int, token: int = IMAGE) -> list[int]:
    return [START, *[token] * features, END]


def prompt(*parts: list[int]) -> tuple[int, ...]:
    return (*TOKENIZER.encode("See: "), *(token for part in parts for token in part), *TOKENIZER.encode(" it is"))


def request(tokens, *batches) -> protocol.GenerateRequest:
    made = generate_request(prompt=tokens, logprobs=0)
    if batches:
        made.mm_inputs.CopyFrom(batches[0])
        made.extra_mm_inputs.extend(batches[1:])
    return made


def assert_seen(made: protocol.GenerateRequest, tokens, media: Media) -> None:
    """Fail unless the answer is the engine's for this prompt and these pictures."""
    worker = shared_worker()
    ((complete,),) = answers(worker, made)
    expected = engine_alone(worker, tokens, media)
    assert list(complete.output_ids) == expected.tokens
    np.testing.assert_allclose(complete.output_logprobs.token_logprobs, expected.logprobs, rtol=0, atol=1e-4)
    asyncio.run(settled(worker))


def test_images_reach_the_model():
    tokens = prompt(seen(4), seen(4))
    assert_seen(request(tokens, batch(SQUARE, WIDE)), tokens, Media([SQUARE, WIDE]))
    other, same = answers(
        shared_worker(), request(tokens, batch(WIDE, SQUARE)), request(tokens, batch(SQUARE, WIDE, im_token_id=IMAGE))
    )
    assert other[0].output_logprobs.token_logprobs[0] != same[0].output_logprobs.token_logprobs[0]


def test_a_video_in_one_grid_is_cut_into_chunks():
    """As the gateway SMG sends it, with images in a batch of their own."""
    pairs = [seen(2, VIDEO) for _ in range(6)]
    tokens = prompt(seen(4), *pairs)
    made = request(tokens, batch(SQUARE), batch(CLIP, modality="video", im_token_id=VIDEO))
    made.extra_mm_inputs[0].model_specific_tensors["video_second_per_grid"].CopyFrom(tensor(np.ones(1, np.float32)))
    patches, (_, height, width) = CLIP
    chunks = (patches, [(4, height, width), (2, height, width)])
    assert_seen(made, tokens, Media([SQUARE], [chunks]))
    # The same clip as two grids of one video.
    split = batch(CLIP, modality="video")
    split.model_specific_tensors["video_grid_thw"].CopyFrom(tensor(np.array(chunks[1], np.int64)))
    assert_seen(request(tokens, batch(SQUARE), split), tokens, Media([SQUARE], [chunks]))


def test_placeholders_say_which_picture_comes_first():
    tokens = prompt(seen(4), seen(4))
    later, first = (protocol.PlaceholderRange(offset=offset, length=6) for offset in (20, 3))
    made = request(
        tokens, batch(SQUARE, mm_placeholders=[later]), batch(WIDE, mm_placeholders=[first], mm_hashes=["ab"])
    )
    assert_seen(made, tokens, Media([WIDE, SQUARE]))


def test_features_go_where_im_token_id_says():
    tokens = prompt(seen(4))
    other = tuple(1500 if token == IMAGE else token for token in tokens)
    assert_seen(request(other, batch(SQUARE, im_token_id=1500)), tokens, Media([SQUARE]))


def test_kv_events_name_the_pictures_of_a_page():
    """A page has the gateway's placeholders, and each picture's hash with the place of its first token, as vLLM's."""
    other = 1500  # the gateway's own placeholder
    tokens = prompt(seen(4), [77], [START, *[VIDEO] * 8, END, START, *[VIDEO] * 4, END], list(range(300, 330)))
    start = tokens.index(START)
    sent = tuple(other if token == IMAGE else token for token in tokens)
    square = batch(SQUARE, im_token_id=other, mm_hashes=["square"])
    square.mm_placeholders.add(offset=start, length=6)
    patches, (_, height, width) = CLIP
    clip = (patches, (6, height, width))
    video = batch(clip, modality="video", mm_hashes=["clip"])
    video.mm_placeholders.add(offset=start + 7, length=16)
    worker = shared_worker()

    async def stored(made) -> list[common_pb2.KvBlock]:
        stream = worker.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await worker.FlushCache(common_pb2.FlushCacheRequest(timeout_s=20))
        await collect(worker, made)
        await settled(worker)
        batches, found = [], []
        while True:
            try:
                batches.append(await asyncio.wait_for(anext(stream), 0.3 if found else 20))
            except TimeoutError:  # there are no more
                break
            found = [event.stored for each in batches for event in each.events if event.HasField("stored")]
        await stream.aclose()
        return [block for each in found for block in each.blocks]

    size = 16
    blocks = asyncio.run(stored(request(sent, square, video)))
    of_page = {tuple(block.token_ids): block for block in blocks}
    pages = [sent[first : first + size] for first in range(0, len(sent) - size + 1, size)]
    assert len(pages) >= 3 and all(page in of_page for page in pages)
    spans = {"square": (start, start + 6), "clip": (start + 7, start + 7 + 16)}
    owner = {
        place: name for name, span in spans.items() for place in range(*span) if sent[place] in (other, VIDEO)
    }  # fmt: skip
    for first, page in zip(range(0, len(sent), size), pages, strict=False):
        found = [(key.multimodal.identifier, key.multimodal.offset) for key in of_page[page].extra_keys]
        names = dict.fromkeys(owner[place] for place in range(first, first + size) if place in owner)
        assert found == [(name, spans[name][0] - first) for name in names]
    assert {name for block in blocks for name in (key.multimodal.identifier for key in block.extra_keys)} == set(spans)


def test_types_of_patches():
    patches, grid = SQUARE
    rounded = patches.astype(ml_dtypes.bfloat16)
    sent = batch(SQUARE)
    sent.pixel_values.CopyFrom(tensor(rounded, "bfloat16"))
    _, media, _ = MediaReader({"image": IMAGE, "video": VIDEO}).read([sent], (5,))
    np.testing.assert_array_equal(media.images[0][0], rounded.astype(np.float32))
    assert media.images[0][1] == grid


def changed(path: str, value) -> protocol.MultimodalInputs:
    """Return a good batch with one thing wrong."""
    sent = batch(SQUARE)
    if path in ("modality", "encoder_input_key"):
        setattr(sent, path, value)
    elif path in ("pixel_values", "image_grid_thw", "patches_per_image", "other"):
        target = sent.pixel_values if path == "pixel_values" else sent.model_specific_tensors[path]
        target.CopyFrom(value)
    return sent


NAN = np.full_like(SQUARE[0], np.nan)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("modality", common_pb2.AUDIO, "images and videos"),
        ("encoder_input_key", "patches", "encoder_input_key"),
        ("other", tensor(np.ones(1, np.float32)), "'other'"),
        ("pixel_values", protocol.TensorData(shape=[16, 1176], dtype="float32", inline=b"abc"), "bytes, inline; got 3"),
        ("pixel_values", protocol.TensorData(shape=[16, 1176], dtype="float31"), "float31"),
        ("pixel_values", tensor(SQUARE[0].reshape(-1)), "[patches, 1176]"),
        ("pixel_values", tensor(SQUARE[0][:12]), "12 patches"),
        ("pixel_values", tensor(SQUARE[0][:, :100].copy()), "1176"),
        ("pixel_values", tensor(NAN), "NaN"),
        ("pixel_values", protocol.TensorData(shm=common_pb2.ShmHandle(name="x")), "shm"),
        ("image_grid_thw", tensor(np.array([[1, 4]])), "[n, 3]"),
        ("image_grid_thw", tensor(np.array([[1, -4, -4]])), "at least 1"),
        ("image_grid_thw", tensor(np.array([[2**31, 2**31, 4]])), "16 patches"),
        ("image_grid_thw", tensor(np.array([[1, 8, 2]], np.float32)), "integers"),
        ("patches_per_image", tensor(np.array([8, 8])), "patches_per_image"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(path, value, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        asyncio.run(collect(shared_worker(), request(prompt(seen(4)), changed(path, value))))


def test_pictures_that_do_not_fit_the_prompt_are_refused():
    for tokens, batches in (
        (prompt(), [batch(SQUARE)]),
        (prompt(seen(4)), []),
        (prompt(seen(3)), [batch(SQUARE)]),
        (prompt(seen(4)), [batch(CLIP, modality="video")]),
    ):
        with pytest.raises(ValueError, match="placeholder"):
            asyncio.run(collect(shared_worker(), request(tokens, *batches)))
    with pytest.raises(ValueError, match="no vision tower"):
        MediaReader({}).read([batch(SQUARE)], prompt(seen(4)))


def test_damaged_requests_are_refused_or_served():
    """Bytes changed at random in a request with everything in it: what is still a message has no other error."""
    place = protocol.PlaceholderRange(offset=3, length=6)
    whole = request(prompt(seen(4)), batch(SQUARE, im_token_id=IMAGE, mm_placeholders=[place]))
    whole.stream, patches = True, whole.mm_inputs.pixel_values.inline
    more = protocol.SamplingParams(stop=["x"], logit_bias={5: 1.0}, regex="[a-z]+", min_p=0.1, seed=3)
    whole.sampling_params.MergeFrom(more)
    whole.mm_inputs.pixel_values.ClearField("inline")  # or nearly all damage would be to pixels
    data, rng, counts = whole.SerializeToString(), np.random.default_rng(0), Counter()

    async def serve_damaged():
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        try:
            made = protocol.GenerateRequest.FromString(bytes(damaged))
        except DecodeError:
            return
        if made.mm_inputs.HasField("pixel_values"):
            made.mm_inputs.pixel_values.inline = patches
        try:
            async with aclosing(shared_worker().Generate(made)) as messages:
                await anext(messages)
            counts["served"] += 1
        except ValueError:
            counts["refused"] += 1

    async def run():
        for _ in range(80):
            await serve_damaged()
        await settled(shared_worker())

    asyncio.run(run())
    assert counts["served"] > 4 and counts["refused"] > 20, counts
