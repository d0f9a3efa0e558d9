"""PTX that makes numbers of MXFP8: four codes become four numbers times their powers of two, rounded once.

E4M3 goes over float16 and float32, which hold it. bfloat16 holds it too, and then multiplies two numbers at a time:
$2 are the codes, and $3 and $4 twice the power of the first two and of the last two. float16 has not all of the powers:
$3 to $6 are those of each number, in float32. $0 and $1 are the numbers, two in each.
"""

_IN_FLOAT32 = """\
mov.b32 {codes0, codes1}, $2;
cvt.rn.f16x2.e4m3x2 pairs0, codes0;
cvt.rn.f16x2.e4m3x2 pairs1, codes1;
mov.b32 {halves0, halves1}, pairs0;
mov.b32 {halves2, halves3}, pairs1;
cvt.f32.f16 numbers0, halves0;
cvt.f32.f16 numbers1, halves1;
cvt.f32.f16 numbers2, halves2;
cvt.f32.f16 numbers3, halves3;
"""
FOUR_BFLOAT16 = f"""
{{
.reg .b16 codes<2>, halves<4>;
.reg .b32 pairs<2>, exact<2>;
.reg .f32 numbers<4>;
{_IN_FLOAT32}cvt.rn.bf16x2.f32 exact0, numbers1, numbers0;
cvt.rn.bf16x2.f32 exact1, numbers3, numbers2;
mul.rn.bf16x2 $0, exact0, $3;
mul.rn.bf16x2 $1, exact1, $4;
}}
"""
FOUR_FLOAT16 = f"""
{{
.reg .b16 codes<2>, halves<4>;
.reg .b32 pairs<2>;
.reg .f32 numbers<4>;
{_IN_FLOAT32}mul.f32 numbers0, numbers0, $3;
mul.f32 numbers1, numbers1, $4;
mul.f32 numbers2, numbers2, $5;
mul.f32 numbers3, numbers3, $6;
cvt.rn.f16x2.f32 $0, numbers1, numbers0;
cvt.rn.f16x2.f32 $1, numbers3, numbers2;
}}
"""
