"""A plan's numbers one by one: figures of chips, slices, and each term of the arithmetic by hand."""

import pytest
from support import tiny, vision

from m3jax.config import M3Config
from m3jax.planning import M3_DRAFT, Job, evaluate, parse_slice
from m3jax.planning.arithmetic import Work, drafting, memory
from m3jax.planning.chips import CHIPS
from m3jax.vision import VisionConfig

CONFIG = tiny.config("dM")
ONE = dict(data=1, context=1, expert=1, tensor=1)

# GiB that a program can use, TB/s, TFLOP/s in bfloat16, GB/s of links one way, devices a chip, sizes, most chips.
TPUS = {
    "v5e": (15.75, 0.819, 197, 200, 1, 2, 256), "v5p": (95.74, 2.765, 459, 600, 1, 3, 8960),
    "v6e": (31.25, 1.638, 918, 400, 1, 2, 256), "tpu7x": (94.75, 3.69, 1153.5, 300, 2, 3, 9216),
}  # fmt: skip
GPUS = {"h100": (80, 3.35, 989, 450, 8), "h200": (141, 4.8, 989, 450, 8), "b200": (180, 8, 2250, 900, 72)}  # GB


def test_the_figures_of_chips():
    """Of Google's pages and NVIDIA's data sheets, whose link rates count both ways; a TPU7x is two devices."""
    assert CHIPS.keys() == TPUS.keys() | GPUS.keys()
    for name, (gib, terabytes, teraflops, link, devices, dims, most) in TPUS.items():
        chip = CHIPS[name]
        assert (chip.kind, chip.hbm, chip.devices, chip.dims, chip.most) == ("tpu", gib * 2**30, devices, dims, most)
        rates = (chip.hbm_rate, chip.flops, chip.link_rate)
        assert rates == pytest.approx((1e12 * terabytes, 1e12 * teraflops, 1e9 * link))
    for name, (gigabytes, terabytes, teraflops, link, most) in GPUS.items():
        chip = CHIPS[name]
        assert (chip.kind, chip.devices, chip.dims, chip.most) == ("gpu", 1, 0, most)
        rates = (chip.hbm, chip.hbm_rate, chip.flops, chip.link_rate)
        assert rates == pytest.approx((1e9 * gigabytes, 1e12 * terabytes, 1e12 * teraflops, 1e9 * link))
    assert [CHIPS[name].compiler_name for name in TPUS] == ["v5litepod-4", "v5p-8", "v6e-4", "tpu7x-8"]


SLICES = {
    "v5e:8x4": 32, "v6e:16x16": 256, "v6e:2x16": 32, "v5p:4x4x1": 16, "v5p:2x2x2": 8, "v5p:2x4x4": 32, "v5p:4x2x2": 16,
    "v5p:16x20x28": 8960, "tpu7x:16x16x36": 18432, "h100:1": 1, "h200:8": 8, "b200:72": 72, "B200:9": 9,
}  # fmt: skip
NEAREST = {
    "v6e:32x1": "v6e:2x16", "v6e:16x17": "v6e:16x16", "v5e:1x2": "v5e:2x2", "v5e:4": "v5e:2x2", "v5p:2x2": "v5p:2x2x1",
    "v5p:1x1x1": "v5p:2x2x1", "v5p:2x1x2": "v5p:2x2x1", "v5p:6x6x6": "v5p:4x8x8", "v5p:16x24x24": "v5p:16x20x24",
    "v5p:16x16x33": "v5p:16x16x32", "v5p:3x3x3": "v5p:2x4x4",
    "tpu7x:2x2x3": "tpu7x:2x2x2", "v5p:": "v5p:2x2x1", "h100:0": "h100:1", "b200:100": "b200:72", "h200:": "h200:1",
    "h200:2x2": "h200:4",
}  # fmt: skip


def test_slices_that_exist_and_the_nearest_to_those_that_do_not():
    for text, devices in SLICES.items():
        assert (str(parse_slice(text)), parse_slice(text).num_devices) == (text.lower(), devices)
    found = {}
    for text in NEAREST:
        with pytest.raises(ValueError, match=r"takes .*; the nearest valid is '.*'") as error:
            parse_slice(text)
        found[text] = str(error.value).rsplit("'", 2)[1]
        assert parse_slice(found[text])
    assert found == NEAREST


# The arithmetic by hand: 48 wide, 8 heads of 16 over 4 KV heads, 20 index dims, 3 blocks of 8, 2 of 8 experts of 40.


def job(topology: str = "v5p:2x2x2", **changes) -> Job:
    values = dict(config=CONFIG, slice=parse_slice(topology), context=256, batch=4, dtype="float32", chunk=8)
    return Job(**(values | changes))


EXPERT = 3 * 48 * 40  # numbers


def test_work_of_one_device_by_hand():
    """A step of four rows and a chunk of eight tokens over 256: projections, dense and sparse attention, experts."""
    found = evaluate(job(), ONE)
    read = found.memory.other_weights - 4 * 64 * 48  # all but the embedding
    head = 48 * 64
    body = read / 4 - head
    assert found.decode.flops == (
        2 * 4 * (body + head) + 4 * 8 * 16 * 4 * (256 + 24) + 4 * 4 * 20 * 2 * 256 + 2 * 4 * 2 * EXPERT
    )
    chosen = 8 * (1 - (7 / 8) ** 8)
    keys = 4 * (256 + 24) * 2 * 4 * 16 + 4 * 256 * 20
    assert found.decode.traffic == pytest.approx(read + 4 * keys + 4 * chosen * EXPERT)
    assert found.prefill.flops == (
        2 * (8 * body + 4 * head) + 8 * 8 * 16 * 4 * (256 + 24) + 8 * 4 * 20 * 2 * 256 + 2 * 8 * 2 * EXPERT
    )
    chosen = 8 * (1 - (7 / 8) ** 16)
    keys = (256 + 8 * 24) * 2 * 4 * 16 + 256 * 20  # eight queries may select as many blocks each
    assert found.prefill.traffic == pytest.approx(read + 4 * keys + 4 * chosen * EXPERT)
    assert found.decode.sent == found.prefill.sent == 0
    # Seventeen queries and more are taken to select the same blocks, sixteen are not; a chunk is within its context.
    few, many = (evaluate(job(chunk=n, context=1000), ONE).prefill.traffic for n in (16, 17))
    pairs = [8 * (1 - (7 / 8) ** (2 * n)) for n in (16, 17)]
    assert few - many == pytest.approx(4 * (16 * 24 - 24) * 2 * 4 * 16 + 4 * (pairs[0] - pairs[1]) * EXPERT)
    assert evaluate(job(chunk=512), ONE).prefill == evaluate(job(chunk=256), ONE).prefill


def test_bytes_on_links_by_hand():
    """Parts of attention are joined over context and expert, tokens go to experts and back, sums go over tensor."""
    for dtype, size in (("float32", 4), ("bfloat16", 2)):  # sums of experts' parts are float32, and whole
        found = evaluate(job(dtype=dtype), ONE | {"context": 2})
        assert found.decode.sent == (4 * 4 * 4 * 32 + 4 * 8 * (size * 16 + 8) * 2) + 4 * 4 * 48, dtype
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        sent = evaluate(job(dtype=dtype, chunk=256), ONE | {"expert": 2, "tensor": 2}).prefill.sent
        embedding, logits = 4 * 256 * 48, 4 * 4 * 64 / 2
        scattered = (4 + size) * 4 * 128 * 48 / 2
        exchanged = (4 + size) * 128 * 48
        attention = 4 * 256 * 2 * 32 + 256 * 4 * (16 * size + 8) * 2
        assert sent == embedding + logits + scattered + exchanged + attention, dtype
    seconds = Work(2e12, 3e9, 5e9).seconds(CHIPS["h100"])
    assert seconds == pytest.approx(dict(compute=2 / 989, memory=3 / 3350, links=5 / 450))
    assert Work(2e12, 3e9, 5e9).roofline(CHIPS["h100"]) == seconds["links"]
    assert Work(1, 2, 3) + Work(10, 20, 30) == Work(11, 22, 33)


def test_temporaries_by_hand():
    """Activations of a chunk, logits, scores, gathered keys; of MXFP8 the widest matrix, of images the widest step."""
    held = 4 * (2 * 2**26 + 2 * 2**24)
    assert memory(job(), ONE).temporaries == held + 8 * 4 * (4 * 48 + 2 * 88 + 3 * 128) + 4 * 4 * 4 * 64
    assert memory(job(), ONE | {"tensor": 2}).temporaries == held + 8 * 4 * (4 * 48 + 88 + 3 * 64) + 4 * 4 * 4 * 32
    full = Job(
        config=M3Config.m3(), slice=parse_slice("v5p:4x4x4"), context=1 << 17, batch=4, chunk=2048, weights="mxfp8"
    )
    found = memory(full, ONE | {"tensor": 4}).temporaries
    activations = 2048 * 4 * (4 * 6144 + 2 * 12288 / 4 + 16 * 64 / 4 * 128)
    assert found == held + activations + 4 * 4 * 4 * 200064 / 4 + 2 * 6144 * 12288 / 4
    pictures = evaluate(job(config=vision.config("dM"), images=2), ONE).memory.temporaries
    assert pictures == max(memory(job(), ONE).temporaries, 5120 * (4 * 1176 + 8 * 88 + 20 * 60))
    published = Job(config=VisionConfig().add_to(M3Config.m3()), slice=parse_slice("v5p:4x4x4"), context=8, images=64)
    assert evaluate(published, ONE).memory.temporaries == 163_840 * (4 * 1176 + 6 * (6144 + 6144))


def test_work_of_images_over_two_devices_by_hand():
    """Three heads are not divided, hidden widths are; each layer sums its MLP, and the projector its features."""
    planned = job(config=vision.config("dM"), images=2)
    patches, features = 2 * 576 * 4, 2 * 576
    for tensor in (1, 2):
        found = evaluate(planned, ONE | {"tensor": tensor})
        layer = 4 * 60**2 + 2 * 576 * 4 * 60 + 2 * 60 * 88 / tensor
        projected = VisionConfig.of(planned.config).projector_hidden_size / tensor
        expected = patches * (2 * layer + 1176 * 60 + projected * (60 + 48)) + features * projected * 5 * 48
        assert found.images.flops == 2 * expected
        assert found.images.traffic == found.memory.vision + 4 * patches * 1176 + features * 48 * 4
        assert found.images.sent == (0 if tensor == 1 else 4 * patches * 60 * 2 + 4 * (patches + features) * 48)


def test_work_of_a_draft_by_hand():
    """Three steps for each of four rows: all weights but the embedding, and keys and values of 64 heads, in pages."""
    planned = Job(config=M3Config.m3(), slice=parse_slice("h200:8"), context=1 << 20, batch=4, draft=M3_DRAFT)
    head = 200_064 * 6144 * 2  # as large as the embedding; every axis divides it
    weights, keys = 6_527_471_616 - head, 2 * 64 * 128 * 2 * 2**20 * 4
    assert drafting(planned, ONE) == Work(2 * 3 * 4 * weights / 2, 3 * (weights + keys), 0)
    assert drafting(planned, ONE | {"context": 8}).traffic == 3 * (weights - 7 / 8 * head + keys / 8)
    joined = 3 * 6144 * 6144 * 2  # the matrix that joins three taps, which no axis divides
    by_tensor = 3 * (weights / 8 + 7 / 8 * joined + keys / 8)
    assert drafting(planned, ONE | {"tensor": 8}).traffic == pytest.approx(by_tensor, rel=1e-4)


def test_limits_of_a_job():
    """Each limit is allowed, and what is one beyond is refused with the nearest."""
    longest = CONFIG.max_position_embeddings
    seeing = vision.config("dM")
    for name, most, fields in (
        ("context", longest, {}), ("batch", 1 << 20, {}), ("chunk", longest, {}),
        ("images", 4096, dict(config=seeing)), ("image_tokens", 16384, dict(config=seeing, images=1)),
    ):  # fmt: skip
        assert getattr(job(**{name: most} | fields), name) == most
        with pytest.raises(ValueError, match=rf"{most + 1}: must be 1 to {most} .*; the nearest is {most}"):
            job(**{name: most + 1} | fields)
        if name != "images":  # none is planned
            with pytest.raises(ValueError, match="the nearest is 1"):
                job(**{name: 0} | fields)
    assert (job(context=17).blocks, job(context=16).blocks) == (3, 2)
    assert (job().kv, job(kv_dtype="bfloat16").kv, job(index_dtype="bfloat16").index) == (
        "float32", "bfloat16", "bfloat16"
    )  # fmt: skip
    for name in ("dtype", "kv_dtype", "index_dtype"):
        with pytest.raises(ValueError, match=rf"--{name.replace('_', '-')} 'float64': allowed are"):
            job(**{name: "float64"})
