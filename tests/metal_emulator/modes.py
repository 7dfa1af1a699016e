"""How kernels are compiled, and so what a launch can notice."""

from enum import Enum


class Mode(Enum):
    """FAST runs at full speed, RACE sees every memory access, UBSAN every undefined operation."""

    FAST = "fast"
    RACE = "race"
    UBSAN = "ubsan"

    @property
    def watches_accesses(self) -> bool:
        return self is Mode.RACE

    @property
    def flags(self) -> tuple[str, ...]:
        """Arguments for clang. The sanitizers' runtimes are never linked: runtime/ answers."""
        return _FLAGS[self]


_FLAGS = {
    Mode.FAST: ("-O2",),
    Mode.RACE: (
        "-O1",
        "-fno-vectorize",
        "-fno-slp-vectorize",
        # Over the elements of a lane, which are neighbours.
        *("-funroll-loops", "-mllvm", "-unroll-runtime=false"),
        # What instrument.py merges: no more bytes than its hooks know.
        "-mprefer-vector-width=128",
        # Functions are marked only: instrument.py watches what is left of their accesses.
        "-fsanitize=thread",
        *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
        *("-mllvm", "-tsan-instrument-memory-accesses=0"),
        *("-mllvm", "-tsan-instrument-memintrinsics=0"),
        *("-mllvm", "-tsan-instrument-atomics=0"),
    ),
    Mode.UBSAN: (
        "-O1",
        "-fsanitize=undefined,float-cast-overflow",
        # What C++ alone has, what guard pages catch anyway, and what takes long to compile.
        "-fno-sanitize=function,null,object-size,pointer-overflow,return,unreachable,vptr",
        "-fsanitize-minimal-runtime",
        "-DEMULATOR_CHECKS_ALIGNMENT",
        "-fno-sanitize-link-runtime",
    ),
}
