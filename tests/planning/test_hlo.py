"""Counts of a compiled program's text: loops and branches, exchanges, products and traffic, each by hand."""

import jax
import jax.numpy as jnp
import pytest

from m3jax.branches import on_one_device_of, rarely
from m3jax.planning import hlo

QUICK = {"xla_backend_optimization_level": 0}

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
    # Of an unknown number of devices all of an array is sent, twice for a sum.
    assert hlo.Collective("all-reduce", 8.0, 2, 0, False, "").sent == 32


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
    """Of what an instruction writes that reads nothing."""
    assert hlo.count(FUSIONS.replace("LINE", f"%n = {array} custom-call()")).traffic == size


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


LOOPS = """HloModule counted, entry_computation_layout={()->f32[]}

%cond (p: (s32[], f32[4,8])) -> pred[] {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%slice (q0: f32[100,8,16], q1: s32[]) -> f32[8,16] {
  %q0 = f32[100,8,16]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %ds = f32[1,8,16]{2,1,0} dynamic-slice(%q0, %q1), dynamic_slice_sizes={1,8,16}
  ROOT %b = f32[8,16]{1,0} bitcast(%ds)
}

%body (p.1: (s32[], f32[4,8], f32[100,8,16])) -> (s32[], f32[4,8], f32[100,8,16]) {
  %p.1 = (s32[], f32[4,8]{1,0}, f32[100,8,16]{2,1,0}) parameter(0)
  %i.1 = s32[]{:S(2)} get-tuple-element(%p.1), index=0
  %x = f32[4,8]{1,0:S(1)} get-tuple-element(%p.1), index=1
  %w = f32[100,8,16]{2,1,0} get-tuple-element(%p.1), index=2
  %f = f32[8,16]{1,0:S(1)} fusion(%w, %i.1), kind=kLoop, calls=%slice
  %d = f32[4,16]{1,0:S(1)} convolution(%x, %f), dim_labels=bf_io->bf
  %r = f32[4,8]{1,0} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[100,8,16]{2,1,0}) tuple(%i.1, %r, %w)
}

%few (a: f32[2]) -> f32[2] {
  ROOT %a = f32[2]{0} parameter(0)
}

%many (c: f32[2]) -> f32[4] {
  %c = f32[2]{0} parameter(0)
  ROOT %g = f32[4]{0} all-gather(%c), dimensions={0}
}

ENTRY %main (e0: f32[2], e1: s32[]) -> f32[] {
  %e0 = f32[2]{0} parameter(0)
  %e1 = s32[] parameter(1)
  %s = (s32[], f32[4,8]{1,0}, f32[100,8,16]{2,1,0}) tuple(%e1)
  %loop = (s32[], f32[4,8]{1,0}, f32[100,8,16]{2,1,0}) while(%s), condition=%cond, body=%body
  %pick = f32[4]{0} conditional(%e1, %e0, %e0), branch_computations={%few, %many}
  ROOT %z = f32[] constant(0)
}
"""


def test_loops_multiply_and_the_dearest_branch_counts():
    counts = hlo.count(LOOPS)
    assert counts.collectives == {"all-reduce": 5, "all-gather": 1}
    assert counts.collective_bytes == {"all-reduce": 5 * 4 * 8 * 4, "all-gather": 16}
    assert counts.flops == 5 * 2 * 4 * 16 * 8 and counts.unknown_loops == 0
    # A turn reads one slice of the weights and writes the sum; the gather reads 8 bytes and writes 16.
    assert counts.traffic == 5 * (8 * 16 * 4 + 4 * 8 * 4) + 24
    assert counts.heaviest[:2] == [(5 * 8 * 16 * 4.0, 5, "%f"), (5 * 4 * 8 * 4.0, 5, "%r")]


def test_a_loop_that_data_ends_counts_once():
    """Unless the compiler says how often it runs: XLA's CPU backend hides the condition in a fusion."""
    counts = hlo.count(LOOPS.replace("direction=LT", "direction=NE"))
    assert counts.unknown_loops == 1 and counts.collectives["all-reduce"] == 1
    known = 'body=%body, backend_config={"known_induction_variable":{"tuple_index":"0"},"known_trip_count":{"n":"7"}}'
    counts = hlo.count(LOOPS.replace("direction=LT", "direction=NE").replace("body=%body", known))
    assert counts.unknown_loops == 0 and counts.collectives["all-reduce"] == 7


def test_a_branch_counts_as_often_as_the_program_says():
    """One that runs rarely does not, and one that each of four devices takes in turn by a quarter."""

    def run(x, w, is_rare):
        with on_one_device_of(4):
            x = jax.lax.cond(is_rare, lambda: x @ w, lambda: x)

        def exact():
            with rarely():
                return jnp.sin(x @ w @ w)

        return jax.lax.cond(is_rare, exact, lambda: jnp.sin(x))

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64), (64, 64))]
    compiled = jax.jit(run).lower(*arrays, jax.ShapeDtypeStruct((), bool)).compile(QUICK)
    product = 2 * 8 * 64 * 64
    assert hlo.count(compiled.as_text()).flops == product / 4
    assert sum(hlo.products(compiled.as_text()).values()) == product / 4


def test_a_kernel_counts_by_its_own_estimate():
    """As libtpu 0.0.42 writes it; without one, all that the kernel may read from."""
    call = '%k = f32[4]{0} custom-call(%e0), custom_call_target="tpu_custom_call"'
    config = (
        ', backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"70","transcendentals":"0",'
    )
    config += '"bytes_accessed":"900"},"serialization_format":"1"}}'
    without, counts = (hlo.count(LOOPS.replace("  ROOT %z", f"  {call}{x}\n  ROOT %z")) for x in ("", config))
    before = hlo.count(LOOPS)
    assert without.traffic - before.traffic == 8 + 16
    assert (counts.traffic - before.traffic, counts.flops - before.flops) == (900, 70)
    # A kernel that says one of the two has none of the other.
    for said in ("flops", "bytes_accessed"):
        one = hlo.count(
            LOOPS.replace("  ROOT %z", f'  {call}, backend_config={{"cost_estimate":{{"{said}":"70"}}}}\n  ROOT %z')
        )
        expected = (0, 70) if said == "flops" else (70, 0)
        assert (one.traffic - before.traffic, one.flops - before.flops) == expected


# As XLA of jax 0.11.2 writes it.
CUBLAS = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}'
)


def test_a_collective_is_hidden_where_a_product_stands_before_its_end():
    """In the order of the schedule; one that was awaited before hides nothing."""
    begin, end = (
        f"  %{name} = (f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) all-to-all-{op}({of})\n"
        for name, op, of in (("s", "start", "%x"), ("e", "done", "%s"))
    )
    product = next(line for line in LOOPS.splitlines(True) if "%d = " in line)
    for lines, hidden in ((begin + product + end, 5), (begin + end + product, 0), (product + begin + end, 0)):
        program = LOOPS.replace(product, lines)
        counts = hlo.count(program)
        assert counts.collectives["all-to-all"] == 5 and counts.hidden_collectives["all-to-all"] == hidden
        exchanged = {each.kind: each.is_hidden for each in hlo.collectives(program)}
        assert exchanged == {"all-to-all": hidden > 0, "all-reduce": False, "all-gather": False}
    by_cublas = product.replace("f32[4,16]{1,0:S(1)} convolution", "(f32[4,16]{1,0}, s8[64]{0}) custom-call").replace(
        "dim_labels=bf_io->bf", CUBLAS
    )
    assert by_cublas.count("custom-call") == 1 and CUBLAS in by_cublas
    counts = hlo.count(LOOPS.replace(product, begin + by_cublas + end))
    assert (counts.hidden_collectives["all-to-all"], counts.flops) == (5, hlo.count(LOOPS).flops)
