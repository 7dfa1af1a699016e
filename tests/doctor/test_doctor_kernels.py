"""The doctor's variants, its float64 attention, and kernels that it must find wrong."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext, ops
from mlx_paged.doctor import apart, float64, kernels
from mlx_paged.doctor.__main__ import main
from mlx_paged.doctor.findings import Findings
from mlx_paged.doctor.flags import KINDS
from mlx_paged.doctor.variants import (
    BLOCK_SIZES,
    DTYPES,
    GROUPS,
    HEADS,
    OPTIONS,
    QUANTIZED,
    QUICK_STEP,
    SPOILED,
    TOKENS,
    Variant,
    all_variants,
    attention_call,
    launches_of,
    normal,
)
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.numpy_reference import paged_attention_numpy

VARIANTS = all_variants()
DECODE = Variant("attention", "float16", "d64", 16, 4)
WEIGHTS = Variant("attention", "bfloat16", "d80", 8, 2, 5, "weights")
WRITE = Variant("write", "bfloat16", "latent576", 32)
COPY = Variant("copy", "float32", "d64", 8)
SAMPLE = [
    Variant("attention", "float32", "d128", 32, 2, 5, "window"),
    DECODE,
    WEIGHTS,
    WRITE,
    COPY,
    Variant("attention", "float16", "latent576", 16, 8, 1, "long"),
]
OF_QUANTIZED = [
    Variant("attention", "kv8", "d128", 16, 4, 5, "many"),
    Variant("attention", "kv4", "d192v128", 8, 2, 1, "weights"),
    Variant("write", "kv4", "d80", 8),
    Variant("write", "kv8", "d20", 8),
    Variant("copy", "kv4", "d80", 16),
]
OTHER_QUANTIZED = [
    Variant("attention", "kv4", "d64", 16, 4, 1, "long"),
    Variant("attention", "kv8", "d256", 32, 1, 5),
    Variant("attention", "kv6", "d80", 16, 4, 5),
]
NUM_POOLS = len(DTYPES) * len(HEADS) + len(QUANTIZED) * (len(HEADS) - 1) - 2
"""Formats with head dimensions: latents are not quantized, and 20 dimensions to 8 bits only."""


FAINT = [
    Variant("attention", "kv8", "d256", 32, 8, 5, "many"),
    Variant("attention", "float16", "d96", 32, 2, 1, "many"),
    Variant("attention", "kv4", "d192v128", 32, 8, 5, "many"),
]
"""Some output rows of these are nothing but subnormal numbers of float16."""

OF_EACH_KIND = [
    *{
        (v.kind, v.dtype, v.option, v.heads): v for v in VARIANTS if v.heads in ("d64", "latent576")
    }.values()
]
"""One variant of each kind, dtype and option, with one pair of dimensions and with latents."""


def flushed(array: mx.array) -> mx.array:
    """A float16 array with zeros in place of denormal numbers."""
    if array.dtype != mx.float16:
        return array
    numbers = np.array(array)
    is_denormal = (numbers != 0) & (abs(numbers) < np.finfo(np.float16).smallest_normal)
    return mx.array(np.where(is_denormal, np.float16(0), numbers))


def plant(monkeypatch: pytest.MonkeyPatch, op: str, wrong: Callable[..., object]) -> None:
    """Let `wrong` answer in place of an op, which it gets first."""
    monkeypatch.setattr(ops, op, partial(wrong, getattr(ops, op)))


def failures(variants: list[Variant] = SAMPLE) -> dict[str, str]:
    """What a comparison finds, by variant."""
    found = Findings("kernels")
    kernels.compare(variants, found)
    return dict(failure.split(": ", 1) for failure in found.failures)


class TestVariants:
    def test_there_is_every_combination_without_options(self):
        plain = [v for v in VARIANTS if (v.op, v.option) == ("attention", "plain")]
        sizes = map(len, (BLOCK_SIZES, GROUPS, TOKENS))
        assert len(plain) == len(set(plain)) == NUM_POOLS * np.prod([*sizes])

    def test_there_is_every_option_with_every_head_dimension(self):
        seen = {(v.option, v.dtype, v.heads, v.tokens) for v in VARIANTS if v.op == "attention"}
        assert len(seen) == len(OPTIONS) * NUM_POOLS * len(TOKENS)

    @pytest.mark.parametrize(
        ("option", "kernel"),
        [("plain", "_r4_s8"), ("crowd", "_r4_s4"), ("long", "_r4_s8"), ("long-crowd", "_r4_s4")],
    )
    def test_calls_of_few_threadgroups_and_of_many_have_variants(self, option, kernel):
        arrays, options = attention_call(Variant("attention", "float16", "d64", 16, 4, 1, option))
        call = _ext.metal.plan_attention(*arrays, scale=1.0, **options)
        assert call["launches"][0]["kernel"].endswith(kernel)
        assert (len(call["launches"]) > 1) == option.startswith("long")

    def test_names_are_unique(self):
        assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)

    def test_a_quick_check_has_every_value_of_every_property(self):
        for field in fields(Variant):
            values = {getattr(variant, field.name) for variant in VARIANTS}
            assert {getattr(v, field.name) for v in VARIANTS[::QUICK_STEP]} == values

    @pytest.mark.parametrize("option", [option for option in OPTIONS if option not in SPOILED])
    def test_the_float64_attention_is_that_of_the_tests(self, option):
        arrays, options = attention_call(Variant("attention", "float32", "d32", 8, 4, 5, option))
        options = {
            name: kernels.to_numpy(value) if isinstance(value, mx.array) else value
            for name, value in options.items()
            if name not in ("return_attn", "shared_prefixes")
        }
        arrays = [*map(kernels.to_numpy, arrays)]
        got = float64.attention(*arrays, **options)
        want = paged_attention_numpy(*arrays, scale=32**-0.5, return_attn=True, **options)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


class TestTolerance:
    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
    @pytest.mark.parametrize("size", [1.0, 2.0**-13, 2.0**-14, 2.0**-15, 2.0**-20, 2.0**-24])
    def test_right_rounding_is_within_the_bound_and_twice_its_error_is_not(self, dtype, size):
        """The worst numbers lie in the middle of two neighbours; half of the row is larger."""
        eps = mx.finfo(dtype).eps
        step = max(size, mx.finfo(dtype).smallest_normal) * eps
        for large in (size, 1.0):
            want = np.array([[size + step / 2] * 8 + [large] * 8])
            rounded = kernels.to_numpy(mx.array(want.astype(np.float32)).astype(dtype))
            error = float64.worst_row(rounded, want, dtype)
            assert error <= eps / 2
            assert large != size or error > eps / 6
            twice = want + 2 * np.where(np.arange(16) < 8, step / 2, 0)
            assert float64.worst_row(twice, want, dtype) == pytest.approx(2 * error, rel=2**-7)

    def test_a_row_that_must_be_zero_has_no_tolerance(self):
        want = np.zeros((2, 4))
        assert float64.worst_row(want, want, mx.float16) == 0
        assert float64.worst_row(want + 2.0**-24, want, mx.float16) == np.inf

    def test_only_subnormal_numbers_may_be_zeros(self):
        least = 2.0**-14
        want = np.array([[0.75, 0.5, -0.3, 2.0**-11 + 1e-8]]) * least
        assert float64.worst_row(0 * want, want, mx.float16) < 2**-11
        assert float64.worst_row(0 * want, want + np.array([least, 0, 0, 0]), mx.float16) > 0.5
        assert float64.worst_row(0 * want, want, mx.bfloat16) == 1
        assert float64.flushed(0 * want, want, mx.float16) == 3  # rounding makes the last one zero

    @pytest.mark.parametrize("variant", FAINT, ids=lambda variant: variant.name)
    def test_rows_of_subnormal_numbers_are_there_and_pass(self, variant, monkeypatch):
        seen = list[bool]()
        right = float64.worst_row

        def watched(got: np.ndarray, want: np.ndarray, dtype: mx.Dtype = mx.float32) -> float:
            seen.append(bool((abs(want) < 2.0**-14).all(axis=-1).any()))
            return right(got, want, dtype)

        monkeypatch.setattr(float64, "worst_row", watched)
        assert failures([variant]) == {} and any(seen)

    def test_no_other_random_number_is_subnormal_in_float16(self):
        numbers = normal(np.random.default_rng(0), 300_000)
        assert np.abs(numbers).min() == 2.0**-14


class TestFlushedNumbers:
    """A GPU that takes subnormal numbers of float16 for zeros, in what it reads and writes."""

    @staticmethod
    def attend(right, q, k, v, *rest, **options):
        k, v = ([flushed(array[0])] for array in (k, v))
        result = right(flushed(q), k, v, *rest, **options)
        return (flushed(result[0]), result[1]) if isinstance(result, tuple) else flushed(result)

    @pytest.mark.heavy
    def test_outputs_and_inputs_pass_and_the_page_says_so(self, monkeypatch):
        plant(monkeypatch, "paged_attention", self.attend)
        variants = [v for v in OF_EACH_KIND if v.op == "attention" and v.heads == "d64"]
        found = Findings("kernels")
        kernels.compare([*FAINT, *variants], found)
        assert found.failures == []
        count = found.numbers["flushed"]["mlx.core.float16"]
        expected = f"{count} subnormal outputs of mlx.core.float16 are zeros: this device flushes"
        assert count > 100 and expected in found.text()

    @pytest.mark.heavy
    def test_in_the_emulator(self, monkeypatch):
        runner = MetalRunner()
        runner.install(monkeypatch)
        plant(monkeypatch, "paged_attention", self.attend)
        found = Findings("kernels")
        kernels.compare(FAINT, found)
        assert found.failures == [] and found.numbers["flushed"]
        assert {kernel.split("_")[0] for kernel in runner.trace.kernels} == {"paged"}

    def test_larger_numbers_that_are_zeros_are_named(self, monkeypatch):
        def wrong(right: Callable[..., mx.array], *arrays: object, **options: object) -> mx.array:
            result = right(*arrays, **options)
            return mx.where(mx.abs(result) < 2.0**-12, mx.zeros_like(result), result)

        plant(monkeypatch, "paged_attention", wrong)
        assert list(failures(FAINT)) == [variant.name for variant in FAINT]

    def test_the_cpu_flushes_nothing(self):
        found = Findings("kernels")
        kernels.compare(FAINT, found)
        assert found.numbers["flushed"] == {} and "flushes" not in found.text()


class TestEveryKind:
    """A mistake is named in each kind of variants, each dtype and each option."""

    def assert_all_are_named(self, variants: list[Variant], monkeypatch) -> None:
        monkeypatch.setattr(kernels, "MAX_FAILURES", len(VARIANTS))
        assert {variant.kind for variant in variants} <= {*KINDS}
        assert list(failures(variants)) == [variant.name for variant in variants]

    def test_there_are_all(self):
        assert {variant.kind for variant in OF_EACH_KIND} == {*KINDS}
        assert {variant.option for variant in OF_EACH_KIND} == {*OPTIONS}

    @pytest.mark.heavy
    def test_the_simplest_forms_are_planned_for_their_variants_alone(self):
        for variant in VARIANTS:
            if variant.is_simplest or variant.heads == "d64":
                planned = [launch["kernel"] for launch in launches_of(variant)]
                if variant.op != "attention":
                    are_simplest = all("_elements_" in kernel for kernel in planned)
                    assert planned and are_simplest is variant.is_simplest, variant.name
                elif variant.is_simplest:
                    [kernel] = planned
                    assert "_r1_" in kernel, variant.name

    @pytest.mark.heavy
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("planted", ["rounding", "tables"])
    def test_of_attention(self, planted, monkeypatch):
        """An error of three tolerances, and another sequence's blocks."""
        unchecked = {"check_tables": False}

        def wrong(right, q, k, v, tables, lens, **options):
            if planted == "tables":
                return right(q, k, v, mx.roll(tables, 1, 0), lens, **options | unchecked)
            result = right(q, k, v, tables, lens, **options)
            out, *weights = result if isinstance(result, tuple) else (result,)
            out = out * (1 + 3 * kernels.tolerance(out.dtype, False))
            return (out, *weights) if weights else out

        plant(monkeypatch, "paged_attention", wrong)
        variants = [v for v in OF_EACH_KIND if v.op == "attention"]
        if planted == "tables":  # latents take most of the time
            variants = [variant for variant in variants if variant.heads == "d64"]
        self.assert_all_are_named(variants, monkeypatch)

    @pytest.mark.parametrize("array", [0, 1])
    def test_of_writes(self, array, monkeypatch):
        """One element of a row."""

        def wrong(right, *arrays, **scales):
            rows = [*arrays[:2]]
            rows[array] = rows[array] + 0
            rows[array][0, 0, 0] = 8.0
            return right(*rows, *arrays[2:], **scales)

        plant(monkeypatch, "write_kv", wrong)
        self.assert_all_are_named([v for v in OF_EACH_KIND if v.op == "write"], monkeypatch)

    def test_of_copies(self, monkeypatch):
        plant(monkeypatch, "copy_blocks", lambda right, k, v, pairs: right(k, v, pairs[:-1]))
        self.assert_all_are_named([v for v in OF_EACH_KIND if v.op == "copy"], monkeypatch)


class TestWrongKernels:
    def test_the_right_ones_pass(self):
        assert failures() == {}

    def test_quantized_pools_pass(self):
        assert failures(OF_QUANTIZED) == {}

    def test_wrong_scales_are_named(self, monkeypatch):
        right = ops.paged_attention

        def wrong(*arrays: object, k_scales: list[mx.array], **options: object) -> object:
            return right(*arrays, k_scales=[k_scales[0] * 1.01], **options)

        monkeypatch.setattr(ops, "paged_attention", wrong)
        assert list(failures(OF_QUANTIZED)) == [variant.name for variant in OF_QUANTIZED[:2]]

    @pytest.mark.parametrize("which", ["k_scales", "v_scales"])
    def test_denormal_scales_that_are_read_as_zeros_are_named(self, which, monkeypatch):
        right = ops.paged_attention

        def wrong(*arrays: object, **options: object) -> object:
            return right(*arrays, **options | {which: [flushed(options[which][0])]})

        monkeypatch.setattr(ops, "paged_attention", wrong)
        found = failures(OF_QUANTIZED + OTHER_QUANTIZED)
        assert list(found) == [v.name for v in OF_QUANTIZED[:2] + OTHER_QUANTIZED]

    @pytest.mark.parametrize("which", [2, 3])
    def test_denormal_scales_that_are_stored_as_zeros_are_named(self, which, monkeypatch):
        right = ops.write_kv

        def wrong(*arrays: object, **scales: object) -> list[mx.array]:
            found = [*right(*arrays, **scales)]
            found[which] = flushed(found[which])
            return found

        monkeypatch.setattr(ops, "write_kv", wrong)
        variants = [OF_QUANTIZED[2], *(Variant("write", kv, "d128", 16) for kv in ("kv8", "kv6"))]
        assert list(failures(variants)) == [variant.name for variant in variants]

    @pytest.mark.sampled(2)
    def test_the_metal_kernels_pass_in_the_emulator(self, monkeypatch):
        runner = MetalRunner()
        runner.install(monkeypatch)
        assert failures() == {}
        ran = {kernel.split("_")[0] for kernel in runner.trace.kernels}
        assert ran == {"paged", "matrix", "merge", "write", "copy"}

    @pytest.mark.parametrize(
        "plant",
        [
            lambda call, q, *rest, **o: call(q[:, ::-1], *rest, **o),
            lambda call, q, k, v, t, n, **o: call(q, k, v, t, n + 1, **o),
            lambda call, q, k, v, t, n, **o: call(q, k, v, t, n - 1, **o),
            lambda call, q, k, v, t, n, **o: call(q, k, v, t[::-1], n, **o),
            lambda call, q, k, v, t, n, **o: call(q, k, v, t, n, **o) + 0 * v[0].sum(),
        ],
        ids=["heads swapped", "one key too many", "one key too few", "tables swapped", "all read"],
    )
    def test_a_wrong_attention_is_named(self, plant, monkeypatch):
        right = ops.paged_attention

        def wrong(q: mx.array, *rest: object, **options: object) -> object:
            is_planted = q.dtype == mx.float16 and q.shape[-1] == 64
            options["check_tables"] = False
            return plant(right, q, *rest, **options) if is_planted else right(q, *rest, **options)

        monkeypatch.setattr(ops, "paged_attention", wrong)
        found = failures()
        assert list(found) == [DECODE.name]
        assert f"repeat: python -m mlx_paged.doctor --only {DECODE.name}" in found[DECODE.name]

    def test_values_that_are_slightly_wrong_are_named(self, monkeypatch):
        right = ops.paged_attention

        def wrong(q: mx.array, *rest: object, **options: object) -> object:
            result = right(q, *rest, **options)
            if q.dtype == mx.float32:
                return result * (1 + 1e-5)
            return (result[0], result[1] * (1 + 1e-5)) if isinstance(result, tuple) else result

        monkeypatch.setattr(ops, "paged_attention", wrong)
        assert list(failures()) == [SAMPLE[0].name, WEIGHTS.name]

    def test_weights_that_are_nan_are_named(self, monkeypatch):
        right = ops.paged_attention

        def wrong(q: mx.array, *rest: object, **options: object) -> object:
            result = right(q, *rest, **options)
            if not isinstance(result, tuple):
                return result
            return result[0], mx.where(result[1] > 0.1, mx.nan, result[1])

        monkeypatch.setattr(ops, "paged_attention", wrong)
        assert list(failures()) == [WEIGHTS.name]

    @pytest.mark.parametrize("dtype", [*DTYPES, *QUANTIZED])
    @pytest.mark.parametrize("option", SPOILED)
    def test_what_is_not_finite_reaches_only_who_sees_it(self, option, dtype):
        """Neither the queries before it nor the sequences that are computed after its own."""
        for tokens in TOKENS:
            variant = Variant("attention", dtype, "d64", 16, 2, tokens, option)
            error, allowed = kernels.error_of(variant)
            assert error <= allowed

    def test_an_infinity_in_the_place_of_a_number_is_named(self, monkeypatch):
        right = ops.paged_attention
        variant = Variant("attention", "float16", "d64", 16, 2, 1, SPOILED[0])

        def wrong(*arrays: object, **options: object) -> object:
            result = right(*arrays, **options)
            return mx.where(mx.isnan(result), mx.inf, result)

        monkeypatch.setattr(ops, "paged_attention", wrong)
        assert kernels.error_of(variant)[0] == np.inf

    def test_a_write_to_the_wrong_slots_is_named(self, monkeypatch):
        right = ops.write_kv
        monkeypatch.setattr(ops, "write_kv", lambda *a: right(*a[:4], a[4] + 1))
        assert list(failures()) == [WRITE.name, COPY.name]

    def test_copies_in_another_order_are_named(self, monkeypatch):
        right = ops.copy_blocks
        monkeypatch.setattr(ops, "copy_blocks", lambda k, v, pairs: right(k, v, pairs[::-1]))
        assert list(failures()) == [COPY.name]

    def test_the_json_of_an_infinite_error_is_valid(self, monkeypatch, tmp_path):
        monkeypatch.setattr(ops, "write_kv", lambda k, v, k_cache, v_cache, _: (k_cache, v_cache))
        path = tmp_path / "report.json"
        assert main(["--only", WRITE.name, "--json", str(path)]) == 1
        report = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert "error inf" in report["checks"]["kernels"]["failures"][0]

    def test_a_crash_in_one_variant_is_its_failure(self, monkeypatch):
        right = ops.paged_attention

        def crash(q: mx.array, *rest: object, **options: object) -> object:
            if q.shape[-1] == 128:
                raise RuntimeError("Unable to build metal library")
            return right(q, *rest, **options)

        monkeypatch.setattr(ops, "paged_attention", crash)
        found = failures()
        assert list(found) == [SAMPLE[0].name]
        assert found[SAMPLE[0].name].startswith("RuntimeError: Unable to build metal library")

    def test_a_kernel_that_never_works_is_not_tried_for_ever(self, monkeypatch):
        monkeypatch.setattr(ops, "paged_attention", None)
        found = Findings("kernels")
        kernels.compare([DECODE] * 100, found)
        assert found.failures[-1] == f"gave up on decode after {kernels.MAX_FAILURES} failures"
        assert len(found.failures) == kernels.MAX_FAILURES + 1

    def test_a_kind_that_fails_does_not_end_the_others(self, monkeypatch):
        monkeypatch.setattr(ops, "paged_attention", None)
        found, copy = Findings("kernels"), kernels.chosen(True, "copy")[:1]
        kernels.compare([DECODE] * 20 + copy, found)
        assert found.numbers["run"] == 1 and found.num_wrong == 0

    @pytest.mark.heavy
    def test_each_kind_is_judged_in_a_process_of_its_own(self, monkeypatch):
        """What happens to the others changes nothing."""
        real = subprocess.run

        def run(command, **options):
            kind = command[command.index("--only") + 1]
            if kind == "decode":
                return subprocess.CompletedProcess(command, -11, "", "the device is lost\n")
            if kind == "chunk":
                raise subprocess.TimeoutExpired(command, options["timeout"])
            return real(command, **options)

        monkeypatch.setattr(kernels, "KINDS", ("decode", "chunk", "copy"))
        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        found = Findings("kernels")
        kernels.check_kernels(found, True)
        assert found.failures == ["decode: ended with status -11: the device is lost"]
        late = f"chunk: nothing counted in {apart.MOST_SECONDS[True]} s"
        assert found.unfinished == late and f"not finished: {late}" in found.text()
        count = len(kernels.chosen(True, "copy"))
        assert found.lines[-1] == f"copy: ok, {count} of {count} variants run"
        assert found.lines[0].startswith("decode: FAILED, 0 of ") and found.num_wrong == 0

    def test_a_refused_kernel_is_named_and_is_no_failure(self, monkeypatch):
        monkeypatch.setitem(ops.refused, "write_kv_half", "line 3: no such type")
        found = Findings("kernels")
        kernels.compare([DECODE], found)
        assert found.ok and found.verdict == "1 kernels are refused"
        assert "write_kv_half: line 3: no such type" in found.text()

    def test_a_refused_write_allows_no_attention_more(self, monkeypatch):
        monkeypatch.setitem(ops.refused, "write_kv_half", "planted")
        right = ops.paged_attention
        monkeypatch.setattr(ops, "paged_attention", lambda *a, **o: right(*a, **o) * (1 + 1e-5))
        assert list(failures(SAMPLE[:1])) == [SAMPLE[0].name]

    def test_a_refused_attention_may_round_as_plain_mlx_does(self, monkeypatch):
        monkeypatch.setattr(ops, "takes_attention", lambda *a, **o: False)
        right = ops.paged_attention
        monkeypatch.setattr(ops, "paged_attention", lambda *a, **o: right(*a, **o) * (1 + 1e-5))
        assert failures(SAMPLE[:1]) == {}

    def test_a_wrong_number_is_counted(self, monkeypatch):
        right = ops.paged_attention
        monkeypatch.setattr(ops, "paged_attention", lambda *a, **o: -right(*a, **o))
        found = Findings("kernels")
        kernels.compare([DECODE], found)
        assert found.num_wrong == 1

    def test_the_command_of_a_failure_repeats_it(self, monkeypatch, capsys):
        assert main(["--only", DECODE.name]) == 0
        assert "1 of 1 variants run" in capsys.readouterr().out
        right = ops.paged_attention
        monkeypatch.setattr(ops, "paged_attention", lambda *a, **o: -right(*a, **o))
        assert main(["--only", DECODE.name]) == 1
        assert f"FAILED: {DECODE.name}: error 2, tolerance 0.00049" in capsys.readouterr().out
