"""Write C for the functions nobody wrote by hand: they succeed, give a handle, or say that they are not supported."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HEAD = """#include <stdlib.h>
void note_stub(const char *);
int nccl_failed(int status, const char *why);
#define API __attribute__((visibility("default")))
#define HANDLE(name) API int name(void **out) { note_stub(#name); *out = calloc(1, 4096); return 0; }
#define UNSUPPORTED(name) API int name(void) { note_stub(#name); return 801; }
#define NO_NCCL(name) API int name(void) { return nccl_failed(5, #name " is not emulated"); }
#define NOTHING(name) API int name(void) { return 0; }
"""
# Hints to NCCL are taken; whatever else is not written by hand is refused by name, or ranks would go on with zeros.
_NCCL = re.compile(r"nccl(?!CommRegister|CommDeregister|CommWindow)")
# What torch does not ask for and bitsandbytes links: a hint to move managed memory, which is where it is.
_HINTS = frozenset({"cudaMemPrefetchAsync"})
_MAKES_A_HANDLE = re.compile(r"Create|CommInit")
# The runtime's and the driver's own: to succeed without doing it would be a lie that torch believes.
_MUST_BE_TRUE = re.compile(r"cuda|__cuda|cu[A-Z][a-z]+[A-Z]")


def stub_source(functions: Iterable[str]) -> str:
    """Return the C source of a stub for each function, and for the hints that other libraries link."""
    return _HEAD + "".join(f"{_kind(name)}({name})\n" for name in sorted({*functions, *_HINTS}))


def _kind(name: str) -> str:
    if _NCCL.match(name):
        return "NO_NCCL"
    if name in _HINTS:
        return "NOTHING"
    if _MAKES_A_HANDLE.search(name):
        return "HANDLE"
    return "UNSUPPORTED" if _MUST_BE_TRUE.match(name) else "NOTHING"
