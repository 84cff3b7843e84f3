"""Reading a compiled object for instructions above its tier: what would end a lesser processor's process."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from headrace.backends.cpu.isa import TIERS, Tier

__all__ = ["instructions_above"]

# What the disassembly of an object may not show, in the AT&T spelling: `mnemonic operands`, registers as %name.
_SSE3_TO_4 = (
    r"^(?:addsub|hadd|hsub|lddqu|movddup|movs[hl]dup|pshufb|phadd|phsub|pabs|palignr|pmaddub|psign|pmulhrs|p?blend"
    r"|pmov[sz]x|pmulld|pmuldq|pm(?:in|ax)(?:sb|sd|uw|ud)|pinsr[bdq]|pextr[bdq]|insertps|extractps|round[ps]"
    r"|ptest|dpp[sd]|mpsadbw|packusdw|pcmpeqq|pcmpgtq|crc32)"
)
_VEX = r"^v\w+ .*%[xyz]mm"
_EVEX_REGISTERS = r"zmm|%[xy]mm(?:1[6-9]|2\d|3[01])\b|%k[0-7]|\{1to\d"
_EVEX_NAMES = (
    r"^v(?:dpbf16|pdpbusd|cvtne|cvt\w*u?(?:udq|qq)\b|movdq[au](?:8|16|32|64)|pternlog|rndscale|reduce[ps]|range[ps]"
    r"|perm[ti]2|pmullq|p?compress|p?expand|rcp14|rsqrt14|scalef|getexp|getmant|fixupimm|psra[v]?q|pabsq"
    r"|pm(?:in|ax)[su]q|pro[lr]|p?blendm|ptestn?m|p(?:and|andn|or|xor)[dq]|(?:shuf|extract|insert|broadcast)[fi](?:32|64)x|pmovu?s?(?:[qd][bwd]|wb))"
)
_TILES = r"tmm|^tdp|^tile|tilecfg"
_OWN = {
    "portable": (),
    "avx2": (_SSE3_TO_4, _VEX),
    "avx512": (_EVEX_REGISTERS, _EVEX_NAMES),
    "amx": (_TILES,),
}
"""What a tier adds to those below it."""
_NO_TIERS = (
    r"^(?:andn[lq]?\b|bextr|bls[ir]|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|popcnt|lzcnt|tzcnt)",
    r"^v?(?:aes|pclmul|gf2p8|sha)",
    r"\bvp(?:dpwu|dpwss|dpbs|dpbuu|madd52|popcnt|shl?d[vdqw]|shrd|multishift|2intersect|ermb|erm[ti]2b)",
    r"\bvp(?:compress|expand)[bw]|^\{vex\} vpdp",
    r"^v(?:add|sub|mul|div|fn?m\w+|max|min|sqrt|rcp|rsqrt)[ps]h\b",
)
"""What no tier asks the processor for: bit manipulation, cryptography, other VNNI, VBMI, arithmetic in halves."""


def instructions_above(path: Path, tier: Tier) -> list[str]:
    """Return the instructions of an x86 object that a tier's processors need not have, each once; [] is right.

    path: an object file or shared object. Runs `objdump`, and raises what running it raises.
    It knows instructions by their registers and names: one that is missing from its lists passes.
    """
    higher = TIERS[: TIERS.index(tier)]
    patterns = [*(pattern for above in higher for pattern in _OWN[above.name]), *_NO_TIERS]
    forbidden = re.compile("|".join(patterns))
    return sorted({line for line in _disassemble(path) if forbidden.search(line)})


def _disassemble(path: Path) -> list[str]:
    """Return the instructions of all code sections, spaces squeezed."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--wide", str(path)]
    listing = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    lines = (line.split("\t", 1) for line in listing.splitlines() if "\t" in line)
    return [" ".join(parts[1].split("#")[0].split()) for parts in lines]
