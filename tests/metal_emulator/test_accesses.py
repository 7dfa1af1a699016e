"""No access of memory that threads share goes without a call of the runtime."""

import re

import pytest

from . import instrument, toolchain

KERNEL = """
@shared = internal global [64 x i32] zeroinitializer

define void @kernel(ptr %in, ptr %out, i64 %i) sanitize_thread {
entry:
  %own = alloca [8 x TYPE], align 16
  br label %loop

loop:
  store TYPE VALUE, ptr %behind, align 2
  br label %end

before:
  %behind = getelementptr inbounds i8, ptr %own, i64 8
  br label %loop

end:
  %from = getelementptr inbounds TYPE, ptr %in, i64 %i
  %loaded = load TYPE, ptr %from, align 2
  store TYPE %loaded, ptr %out, align 2
  store TYPE %loaded, ptr getelementptr (i8, ptr @shared, i64 4), align 2
  ret void
}
""".replace("  br label %loop\n\nloop:", "  br label %before\n\nloop:", 1)

TYPES = {
    "i8": 1,
    "<2 x half>": 4,
    "<3 x i16>": 6,
    "<3 x float>": 12,
    "<2 x ptr>": 16,
    "<6 x i32>": 24,
}


@pytest.mark.parametrize("type_name", TYPES)
def test_every_byte_that_threads_share_is_watched(type_name):
    value = "zeroinitializer" if type_name.startswith("<") else "0"
    code = KERNEL.replace("TYPE", type_name).replace("VALUE", value)
    found = instrument.instrument(code)
    assert watched_bytes(found, "read") == TYPES[type_name]
    assert watched_bytes(found, "write") == 2 * TYPES[type_name]
    toolchain.run("opt", "-S", "-passes=verify", "-", source=found)


def watched_bytes(code: str, kind: str) -> int:
    by_sanitizer = re.findall(rf"call void @__tsan_\w*?{kind}(\d+)\(", code)
    by_us = re.findall(rf"call void @emulator_{kind}\(ptr [^,]+, i64 (\d+)\)", code)
    return sum(map(int, by_sanitizer + by_us))


def test_an_access_that_the_sanitizer_leaves_out_is_refused(monkeypatch):
    monkeypatch.setattr(instrument, "_PASSES", ("-passes=function(load-store-vectorizer)",))
    code = KERNEL.replace("TYPE", "i32").replace("VALUE", "0")
    with pytest.raises(toolchain.CompileError, match=r"no call watches the access .* = load i32"):
        instrument.instrument(code)
