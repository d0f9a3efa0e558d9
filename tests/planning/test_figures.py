"""A plan's numbers one by one: figures of chips, each term of the arithmetic by hand, a program's text, the report."""

import pytest
from support import tiny, vision

from m3jax.config import M3Config
from m3jax.planning import M3_DRAFT, Job, evaluate, hlo, parse_slice
from m3jax.planning.arithmetic import Work, _drafting, memory
from m3jax.planning.chips import CHIPS
from m3jax.planning.report import as_text
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
    assert _drafting(planned, ONE) == Work(2 * 3 * 4 * weights / 2, 3 * (weights + keys), 0)
    assert _drafting(planned, ONE | {"context": 8}).traffic == 3 * (weights - 7 / 8 * head + keys / 8)
    joined = 3 * 6144 * 6144 * 2  # the matrix that joins three taps, which no axis divides
    by_tensor = 3 * (weights / 8 + 7 / 8 * joined + keys / 8)
    assert _drafting(planned, ONE | {"tensor": 8}).traffic == pytest.approx(by_tensor, rel=1e-4)


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
    defaults = Job(config=CONFIG, slice=parse_slice("h200:1"), context=9)
    assert (defaults.batch, defaults.images, defaults.image_tokens, defaults.weights) == (1, 0, 576, "dequantize")


# A program's text

PROGRAM = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: bf16[4,8]) -> bf16[4,4] {
  %p = bf16[4,8]{1,0} parameter(0)
  %w = bf16[8,4]{1,0} custom-call(), custom_call_target="weights"
  ROOT %dot = bf16[4,4]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%heavy (q: bf16[4,8]) -> bf16[4,4] {
  %q = bf16[4,8]{1,0} parameter(0)
  ROOT %call = bf16[4,4]{1,0} call(%q), to_apply=%inner
}

%light (r: bf16[4,8]) -> bf16[4,4] {
  %r = bf16[4,8]{1,0} parameter(0)
  ROOT %part = bf16[4,4]{1,0} slice(%r), slice={[0:4], [0:4]}
}

%write (f0: f32[64,8], f1: f32[1,8], f2: s32[]) -> f32[64,8] {
  %f0 = f32[64,8]{1,0} parameter(0)
  %f1 = f32[1,8]{1,0} parameter(1)
  %f2 = s32[] parameter(2)
  ROOT %dus = f32[64,8]{1,0} dynamic-update-slice(%f0, %f1, %f2, %f2)
}

ENTRY %main (x: bf16[4,8], i: s32[], big: f32[64,8], row: f32[1,8]) -> f32[] {
  %x = bf16[4,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %big = f32[64,8]{1,0} parameter(2)
  %row = f32[1,8]{1,0} parameter(3)
  %pick = bf16[4,4]{1,0} conditional(%i, %x, %x), true_computation=%light, false_computation=%heavy
  %put = f32[64,8]{1,0} fusion(%big, %row, %i), kind=kLoop, calls=%write
  %rs = f32[32,8]{1,0} reduce-scatter(%put), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="sums"}
  %ag = (f32[32,8]{1,0}, f32[128,8]{1,0}) all-gather-start(%rs), replica_groups=[2,4]<=[8], dimensions={0}
  %agd = f32[128,8]{1,0} all-gather-done(%ag)
  %ar = f32[16]{0} all-reduce(%agd), replica_groups=mesh['a'=2,'b'=8]{'a','b':(2)4}, to_apply=%add
  %cp = u8[16]{0} collective-permute(%ar), source_target_pairs={{0,1}}
  %one = f32[1000]{0} all-reduce(%ar), replica_groups={{0},{1}}, to_apply=%add
  ROOT %z = f32[] constant(0)
}
"""


def test_exchanges_of_a_program_by_hand():
    """By what a device sends: on a ring of n, (n - 1) / n of the array, twice of a sum; alone it sends nothing."""
    found = [(each.kind, each.num_bytes, each.num_devices, each.sent) for each in hlo.collectives(PROGRAM)]
    assert found == [
        ("all-gather", 4096, 4, 3072), ("reduce-scatter", 2048, 2, 1024), ("all-reduce", 64, 8, 112),
        ("collective-permute", 16, 0, 16),
    ]  # fmt: skip
    assert [each.origin for each in hlo.collectives(PROGRAM)] == ["%ag", "sums", "%ar", "%cp"]


def test_a_sum_that_a_fusion_cuts_is_a_reduce_scatter():
    """As a TPU's compiler writes it: of the sum each device keeps its own part, in one fusion with it."""
    text = """HloModule main

%all-reduce-scatter (input: f32[16,8]) -> f32[8,8] {
  %input = f32[16,8]{1,0} parameter(0)
  %all-reduce = f32[16,8]{1,0} all-reduce(%input), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %part = f32[8,8]{1,0} dynamic-slice(%all-reduce, %id, %zero), dynamic_slice_sizes={8,8}
}

%twice (y: f32[16,8]) -> f32[16,8] {
  %y = f32[16,8]{1,0} parameter(0)
  ROOT %sum = f32[16,8]{1,0} add(%y, %y)
}

ENTRY %main (x: f32[16,8]) -> f32[8,8] {
  %x = f32[16,8]{1,0} parameter(0)
  %z = f32[16,8]{1,0} fusion(%x), kind=kLoop, calls=%twice
  ROOT %fusion = f32[8,8]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="psum"}
}
"""
    (found,) = hlo.collectives(text)
    assert (found.kind, found.num_bytes, found.num_devices, found.origin) == ("reduce-scatter", 512, 2, "psum")
    counts = hlo.count(text)
    assert counts.collectives == {"reduce-scatter": 1} and counts.collective_bytes == {"reduce-scatter": 256}


def test_traffic_of_a_program_by_hand():
    """The branch whose call has a product counts; a fusion that writes a row in place reads and writes that alone."""
    found = hlo.count(PROGRAM)
    all_runs = hlo.count(PROGRAM, heaviest=100).heaviest
    assert len(all_runs) == 8 and found.heaviest == all_runs[:5] and hlo.count(PROGRAM, 0).heaviest == []
    assert [run[0] for run in all_runs] == sorted((run[0] for run in all_runs), reverse=True)
    assert found.flops == 2 * 4 * 4 * 8
    branch = 8 * 4 * 2 + (4 * 8 + 8 * 4 + 4 * 4) * 2  # what makes the weights, and the product
    written = 8 * 4 + 4 + 8 * 4  # the row, the place, the row
    exchanged = (64 * 8 + 32 * 8 + 32 * 8 + 128 * 8 + 16 + 16 + 16 + 1000) * 4 + 16
    assert found.traffic == branch + written + exchanged
    assert found.collectives == {
        "reduce-scatter": 1, "all-gather": 1, "all-reduce": 2, "collective-permute": 1
    }  # fmt: skip
    assert found.collective_bytes == {
        "reduce-scatter": 1024, "all-gather": 4096, "all-reduce": 64 + 4000, "collective-permute": 16
    }  # fmt: skip


@pytest.mark.parametrize(
    ("array", "size"),
    [("pred[3]", 3), ("s4[6]", 3), ("u8[5]", 5), ("bf16[5]", 10), ("f16[2,2]", 8), ("f8e4m3fn[7]", 7), ("f32[]", 4),
     ("u32[2]", 8), ("s64[2]", 16), ("f64[3]", 24), ("(f32[2], s32[3])", 20), ("f32[0]", 0)],
)  # fmt: skip
def test_bytes_of_types(array, size):
    assert hlo._size(array) == size


FUSIONS = """HloModule m

%inner (a: f32[100,8], i: s32[]) -> f32[8] {
  %a = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %part = f32[1,8]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%part)
}

%outer (x: f32[800], y: f32[4,4], j: s32[], z: f32[64,8]) -> (f32[4,4], f32[512]) {
  %x = f32[800]{0} parameter(0)
  %y = f32[4,4]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %z = f32[64,8]{1,0} parameter(3)
  %rows = f32[100,8]{1,0} bitcast(%x)
  %taken = f32[8]{0} fusion(%rows, %j), kind=kLoop, calls=%inner
  %row = f32[1,8]{1,0} bitcast(%taken)
  %put = f32[64,8]{1,0} dynamic-update-slice(%z, %row, %j, %j)
  %whole = f32[512]{0} bitcast(%put)
  %minus = f32[4,4]{1,0} negate(%y)
  ROOT %both = (f32[4,4]{1,0}, f32[512]{0}) tuple(%minus, %whole)
}

ENTRY %main (x0: f32[800], y0: f32[4,4], j0: s32[], z0: f32[64,8]) -> f32[] {
  %x0 = f32[800]{0} parameter(0)
  %y0 = f32[4,4]{1,0} parameter(1)
  %j0 = s32[] parameter(2)
  %z0 = f32[64,8]{1,0} parameter(3)
  LINE
  ROOT %end = f32[] constant(0)
}
"""


@pytest.mark.parametrize(
    ("line", "read", "written", "flops"),
    [
        # A slice of x, behind a bitcast and in a fusion of its own; all of y and j; of z nothing, but a row is written.
        ("%f = (f32[4,4]{1,0}, f32[512]{0}) fusion(%x0, %y0, %j0, %z0), kind=kLoop, calls=%outer",
         4 * (8 + 16 + 1), 4 * (16 + 8), 0),
        ("%s = f32[2,8]{1,0} slice(%z0), slice={[0:2], [0:8]}", 4 * 16, 4 * 16, 0),
        ("%u = f32[64,8]{1,0} dynamic-update-slice(%z0, %y0, %j0, %j0)", 4 * 16, 4 * 16, 0),
        ("%u = f32[64,8]{1,0} scatter(%z0, %j0, %y0), to_apply=%add", 4 * 16, 4 * 16, 0),
        # What lies in vector memory is neither read from HBM nor written to it.
        ("%n = f32[4,4]{1,0:S(1)} negate(%y0)", 4 * 16, 0, 0),
        ("%c = (f32[4,4]{1,0:S(1)}, f32[4,4]{1,0}, u32[]) copy-start(%y0)", 4 * 16, 0, 0),
        # Four products of eight numbers at each of three places of a window; a window that is a batch has one place.
        ("%p = f32[5,4]{1,0} convolution(%z0, %k0), window={size=3}, dim_labels=0f_0io->0f", 4 * (512 + 96), 80,
         2 * 20 * 3 * 8),
        ("%p = f32[5,4]{1,0} convolution(%z0, %k0), window={size=3 lhs_dilate=5}, dim_labels=0f_0io->0f",
         4 * (512 + 96), 80, 2 * 20 * 8),
        ("%p = f32[5,4]{1,0} convolution(%z0, %k0), window={size=3 rhs_reversal=1}, dim_labels=0f_0io->0f",
         4 * (512 + 96), 80, 2 * 20 * 8),
    ],
)  # fmt: skip
def test_traffic_and_products_of_one_instruction_by_hand(line, read, written, flops):
    kernel = "%k0 = f32[3,8,4]{2,1,0} parameter(4)\n  " if "%k0" in line else ""
    found = hlo.count(FUSIONS.replace("LINE", kernel + line))
    assert (found.traffic, found.flops) == (read + written, flops)
    assert [each[:2] for each in found.heaviest[:1]] == [(read + written, 1)]


def test_of_branches_with_as_much_traffic_the_one_with_more_products_counts():
    """Whichever stands first, called true and false or by number."""
    product = "%p = f32[4,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    body = "%{0} (a{0}: f32[4,4]) -> f32[4,4] {{\n  %a = f32[4,4]{{1,0}} parameter(0)\n  %b = f32[4,4]{{1,0}} " \
        "bitcast(%a)\n  ROOT {1}\n}}\n\n"  # fmt: skip
    added = "%p = f32[4,4]{1,0} add(%a, %b)"
    branches = body.format("heavy", product) + body.format("light", added)
    program = FUSIONS.replace("%inner (", branches + "%inner (")
    for names in (("heavy", "light"), ("light", "heavy")):
        for called in ("true_computation=%{}, false_computation=%{}", "branch_computations={{%{}, %{}}}"):
            line = "%c = f32[4,4]{1,0} conditional(%j0, %y0, %y0), " + called.format(*names)
            assert hlo.count(program.replace("LINE", line)).flops == 2 * 16 * 4


def test_what_another_thread_of_the_device_computes_counts():
    """A computation that is begun and awaited later, as the CPU's and the GPU's compilers write it."""
    for op, key in (("async-start", "calls"), ("call", "to_apply")):
        line = f"%c = f32[8]{{0}} {op}(%x0, %j0), {key}=%inner"
        assert hlo.count(FUSIONS.replace("LINE", line)).traffic == 2 * 4 * 8


# The report

LEAST = dict(flops=2.5e12, traffic=3.25e9, sent=4e6, seconds=0.0123, by=dict(compute=0.01, memory=0.0123, links=0.001))
ANSWER = dict(
    flops=3e12, traffic=4e9, collectives={"all-reduce": 7, "all-gather": 2}, seconds=0.02,
    by=dict(compute=0.001, memory=0.0123, links=0.02), collective_bytes={"all-reduce": 2.5e6, "all-gather": 1e6},
    hidden_collectives={"all-reduce": 3}, lower_seconds=1.6, compile_seconds=70.2, unknown_loops=2,
    heaviest=[(2e9, 60, "layer/attention"), (1e9, 1, "x" * 100), (1e8, 1, "c"), (1, 1, "d")],
)  # fmt: skip
PLAN = dict(
    topology="v5p:2x2x2", devices=8, context=8192, batch=4, dtype="bfloat16", weights="mxfp8", kv_dtype="float16",
    index_dtype="float32", prefill_chunk=2048, draft=True, mesh="data=1", how="compiled", fits=False,
    memory=dict(weights=2.0**31, experts=2.0**30, keys_and_values=2.0**29, index_keys=2.0**28, draft=0.0,
                vision=2.0**30, temporaries=2.0**30, limit=2.0**33, total=2.0**32, arguments=1.0),
    decode=dict(least=LEAST, compiled=ANSWER, expected=dict(
        seconds=0.025, share=0.5, card="H200", date="1 May", is_measured_card=False)),
    prefill=dict(least=LEAST, compiled={"error": "\n  too much memory \nat"}, expected=None),
    images=dict(least=LEAST), image_count=3, image_tokens=576,
    checks=[dict(off=0.1, unit="ms", date="1 May"), dict(off=-0.2, unit="ms", date="2 May"),
            dict(off=0.05, unit="x", date="3 May"), dict(off=0.3, unit="ms", date="1 May")],
    meshes=[dict(mesh="data=1", total=2**32, decode=0.0123, prefill=0.4567, fits=True),
            dict(mesh="data=2", total=2**36, decode=0.5, prefill=1.5, fits=False)],
)  # fmt: skip
TEXT = """\
v5p:2x2x2, 8 devices, mesh data=1 (compiled by the TPU's compiler)
context 8,192, batch 4, weights mxfp8 and bfloat16, keys and values float16, index keys float32

HBM of one device              GiB
  weights                     2.00  of it experts 1.0
  keys and values             0.50
  index keys                  0.25
  vision                      1.00
  temporaries                 1.00
  total                       4.00  of 8.00: 50%
DOES NOT FIT

decode step (4 tokens), one device
                   TFLOP        GB   GB sent        ms
  at least         2.500      3.25     0.004     12.30  by memory
  expected                                       25.00  at 50% of that rate (measured on one H200, 1 May: another card)
  compiled         3.000      4.00     0.004     20.00  by links
  all-gather               2 x,         1.00 MB together, 0 beside products
  all-reduce               7 x,         2.50 MB together, 3 beside products
   50% of the traffic: 60 x layer/attention
   25% of the traffic: 1 x ...{}
    2% of the traffic: 1 x c
  lowered in 2 s, compiled in 70 s; 2 loops whose length is data count once

prefill chunk (2,048 tokens at the end of the context), one device
                   TFLOP        GB   GB sent        ms
  at least         2.500      3.25     0.004     12.30  by memory
  the compiler refused: too much memory

images (3 of 576 tokens, by arithmetic), one device
                   TFLOP        GB   GB sent        ms
  at least         2.500      3.25     0.004     12.30  by memory

how far such times were off where it could be checked (each: --json)
  3 times on one device: -20% to +30% (1 May, 2 May)
  1 speedups of two devices: +5% to +5% (3 May)

best meshes by arithmetic                       GiB  decode ms  prefill ms
  data=1                                        4.0      12.30       456.7
  data=2                                       64.0     500.00      1500.0  does not fit
The draft is arithmetic: its weights, keys and values, and a round of 3 proposals.""".format("x" * 80)


def test_the_report_line_by_line():
    assert as_text(PLAN).splitlines() == TEXT.splitlines()
    parts = {name: value for name, value in PLAN.items() if name not in ("images", "image_count", "image_tokens")}
    memory = {name: size for name, size in PLAN["memory"].items() if name != "arguments"} | {"draft": 2.0**30}
    planned = parts | dict(
        how="arithmetic", weights="dequantize", draft=False, fits=True, checks=[], memory=memory,
        decode=dict(least=LEAST), prefill=dict(least=LEAST),
    )  # fmt: skip
    text = as_text(planned)
    assert "(by arithmetic: nothing was compiled)" in text and "weights bfloat16, keys" in text and "\nfits\n" in text
    assert (
        "  draft                       1.00\n  vision" in text
        and "  temporaries                 1.00  a guess\n" in text
    )
    assert not any(line in text for line in ("images", "how far", "The draft is", "expected", "compiler"))
    refused = as_text(PLAN | dict(memory=planned["memory"]))
    assert "  a guess: the compiler refused\n" in refused


def test_what_was_measured_on_a_card_is_said_of_that_card():
    answer = PLAN["decode"]["expected"] | dict(is_measured_card=True, share=1.0)
    text = as_text(PLAN | dict(decode=dict(least=LEAST, expected=answer)))
    assert "25.00  at 100% of that rate (measured on one H200, 1 May)\n" in text
    # Of an unknown number of devices all of an array is sent, twice for a sum.
    assert hlo.Collective("all-reduce", 8.0, 2, 0, False, "").sent == 32
