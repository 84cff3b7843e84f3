"""No object holds an instruction above its tier: it would end a lesser processor's process.

Objects of tiers that this machine cannot run are compiled and read all the same.
"""

from __future__ import annotations

import platform
import shutil

import pytest

from headrace.backends.cpu.build import build_kernels, kernel_headers, kernel_sources
from headrace.backends.cpu.compiler import find_compiler
from headrace.backends.cpu.isa import AMX, AVX2, AVX512, PORTABLE, TIERS
from headrace.testing.instructions import instructions_above

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump here"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the tiers are x86's"),
]


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_the_packages_kernels(tier):
    path = build_kernels(kernel_sources(), tier, headers=kernel_headers())
    assert instructions_above(path, tier) == []


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_a_small_kernel(kernel, tier):
    path = build_kernels(kernel[0], tier, headers=kernel[1])
    assert instructions_above(path, tier) == []


@pytest.mark.parametrize(
    ("made", "meant", "shown"),
    [
        (AMX, AVX512, "tdpbf16ps"),
        (AVX512, AVX2, "vdpbf16ps"),
        (AVX512, AVX2, "%zmm"),
        (AVX2, PORTABLE, "%ymm"),
        (AVX2, PORTABLE, "vcvtps2ph"),
        (AMX, PORTABLE, "%tmm"),
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_what_is_above_is_seen(kernel, made, meant, shown):
    path = build_kernels(kernel[0], made, headers=kernel[1])
    assert [line for line in instructions_above(path, meant) if shown in line]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("line", "highest"),
    [
        ("pshufb %xmm0, %xmm1", PORTABLE),
        ("roundps $0, %xmm0, %xmm1", PORTABLE),
        ("vaddss %xmm0, %xmm1, %xmm2", PORTABLE),
        ("vfmadd231ps %ymm0, %ymm1, %ymm2", PORTABLE),
        ("vpternlogd $1, %ymm0, %ymm1, %ymm2", AVX2),
        ("vmovdqu8 %xmm0, %xmm1", AVX2),
        ("vaddps %ymm17, %ymm1, %ymm2", AVX2),
        ("vaddps %ymm1, %ymm1, %ymm2{%k1}", AVX2),
        ("vcvtps2udq %ymm1, %ymm2", AVX2),
        ("{vex} vpdpbusd %ymm0, %ymm1, %ymm2", AMX),
        ("vpdpwssd %zmm0, %zmm1, %zmm2", AMX),
        ("vpermb %zmm0, %zmm1, %zmm2", AMX),
        ("tdpbf16ps %tmm0, %tmm1, %tmm2", AVX512),
        ("vaddph %zmm0, %zmm1, %zmm2", AMX),
        ("popcnt %eax, %eax", AMX),
        ("mulx %rax, %rbx, %rcx", AMX),
    ],
)
def test_a_single_instruction_is_seen_in_every_tier_that_lacks_it(tmp_path, line, highest):
    """As the assembler takes it, which knows all; `highest` is the highest tier without it."""
    path = assembled(tmp_path, line)
    lacking = [tier for tier in TIERS if instructions_above(path, tier)]
    assert lacking == list(TIERS[TIERS.index(highest) :])


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("lines", "lowest"),
    [
        (
            ["andnps %xmm0, %xmm1", "pmovmskb %xmm0, %eax", "cvtdq2ps %xmm0, %xmm1", "pmaxsw %xmm0, %xmm1"],
            PORTABLE,
        ),
        (
            ["pand %xmm0, %xmm1", "pinsrw $1, %eax, %xmm1", "movdqa %xmm0, %xmm1", "pminub %xmm0, %xmm1"],
            PORTABLE,
        ),
        (["vpermps %ymm0, %ymm1, %ymm2", "vpsllvd %ymm0, %ymm1, %ymm2", "vpand %ymm0, %ymm1, %ymm2"], AVX2),
        (["vcvtph2ps %xmm0, %ymm1", "vcvtps2dq %ymm0, %ymm1", "vpmovzxwd %xmm0, %ymm1"], AVX2),
        (["vgatherdps %ymm0, (%rax,%ymm1,4), %ymm2", "vinserti128 $1, %xmm0, %ymm1, %ymm2"], AVX2),
        (
            ["vfmadd231ps %zmm0, %zmm1, %zmm2{%k1}{z}", "vpermt2w %zmm0, %zmm1, %zmm2", "kmovq %rax, %k1"],
            AVX512,
        ),
        (
            ["vcvtneps2bf16 %zmm0, %ymm1", "vdpbf16ps %zmm0, %zmm1, %zmm2", "vscalefps %zmm0, %zmm1, %zmm2"],
            AVX512,
        ),
        (["vpmovdb %zmm0, %xmm1", "vreduceps $1, %zmm0, %zmm1"], AVX512),
        (["tileloadd (%rax,%rbx,1), %tmm0", "tdpbssd %tmm0, %tmm1, %tmm2", "tilerelease"], AMX),
    ],
)
def test_what_a_tier_has_is_spared(tmp_path, lines, lowest):
    path = assembled(tmp_path, *lines)
    for tier in TIERS[: TIERS.index(lowest) + 1]:
        assert instructions_above(path, tier) == []


def assembled(folder, *lines):
    """Return a shared object with these instructions, whatever the tier."""
    source = folder / "lines.cpp"
    source.write_text("".join(f'asm("{line}");\n' for line in lines))
    return build_kernels([source], PORTABLE)
