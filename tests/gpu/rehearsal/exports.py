"""Names that a library gives, and C that answers for those which the fake does not have: "not supported", and a note.

torch binds every name of a library when it is loaded, the fake implements what torch and Triton call: the rest, some
thousand functions, is written here at each build, from the libraries and the header that this Python has.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

DYNAMIC_SYMBOLS = 11
"""SHT_DYNSYM of the ELF format, as are the layouts below (64 bits, little endian)."""
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")


def exported(library: Path, pattern: str) -> list[str]:
    """Names of what an ELF library defines and exports, those that match the pattern from their beginning."""
    return sorted({name for name in _defined(library.read_bytes()) if re.match(pattern, name)})


def _defined(data: bytes) -> Iterator[str]:
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [SECTION.unpack_from(data, start + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != DYNAMIC_SYMBOLS:
            continue
        names = sections[link][4]
        for at in range(offset, offset + length, SYMBOL.size):
            name, _, _, section, *_ = SYMBOL.unpack_from(data, at)
            if section:  # those without one are defined elsewhere
                yield data[names + name : data.index(b"\0", names + name)].decode()


def declared(header: Path) -> list[str]:
    """Functions of the driver by cuda.h: as declared, and as macros rename them (cuMemAlloc means cuMemAlloc_v2)."""
    text = header.read_text()
    names = set(re.findall(r"CUDAAPI (cu[A-Z]\w*)\(", text))
    names |= set(re.findall(r"#define cu[A-Z]\w+ +(?:__CUDA_API_PT[DS][SZ]\()?(cu[A-Z]\w+)", text))
    return sorted(names)


def stubs(names: Iterable[str]) -> str:
    """C of functions that say that they are not built; weak, so that a true one goes before."""
    lines = [f'__attribute__((weak)) int {name}(void) {{ return fk_unsupported("{name}"); }}' for name in names]
    return "\n".join(["int fk_unsupported(const char* name);", *lines, ""])
