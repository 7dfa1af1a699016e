"""Recurrent layers on a CPU: as exact as mlx-lm's, with the same bits in every chunk and batch."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, mamba, ssm

from mlx_paged import _ext
from tests.support.ops import recurrent_reference as reference
from tests.support.ops.layer_cases import (
    DTYPES,
    HALVES,
    assert_build_passes,
    float64,
    laid_out,
    random,
)

pytestmark = pytest.mark.usefixtures("on_cpu")

LIMITS = (0.01, 1.5)  # some steps are below and some above


def gated_delta_op(*arrays, mask=None):
    return _ext.recurrent.gated_delta(*arrays, mask)


def scan_op(*arrays, mask=None):
    return _ext.recurrent.state_space_scan(*arrays, mask, limits=LIMITS)


def selective_op(*arrays):
    return _ext.recurrent.selective_scan(*arrays)


KINDS = {
    "delta": (gated_delta_op, reference.delta_arrays, {}),
    "vector gates": (gated_delta_op, reference.delta_arrays, {"has_vectors": True}),
    "scan": (scan_op, reference.scan_arrays, {}),
    "selective": (selective_op, reference.selective_arrays, {}),
}
TOKENS = {"scan": (0, 2, 3, 5), "selective": (0, 2, 3, 5)}  # arrays with a row for each token
SHARED = {"scan": (1, 4, 6), "selective": (1, 4)}  # arrays of the model


def tokens_of(kind: str) -> tuple[int, ...]:
    return TOKENS.get(kind, (0, 1, 2, 3, 4))


def chunk_of(kind: str, arrays: list, state: mx.array | None, part: slice) -> list:
    """The arrays of some tokens, which begin with this state."""
    places = tokens_of(kind)
    own = [a[:, part] if i in places else a for i, a in enumerate(arrays)]
    return [*own[:-1], state]


def bits_of(*arrays: mx.array) -> list[bytes]:
    return [bytes(memoryview(mx.contiguous(x).view(mx.uint8))) for x in arrays]


def error_of(got: mx.array, want: np.ndarray) -> float:
    """The root of the mean of the squares."""
    return float(np.sqrt(np.mean((float64(got) - want) ** 2)))


def mlx_lm_mixer(arrays: list, kind: type) -> object:
    """What a step of mlx-lm's Mamba layers reads of a layer, and no more."""
    x, a_log, b, c, d, dt, _ = arrays

    class Mixer:
        time_step_rank, ssm_state_size, use_bcdt_rms = x.shape[2], b.shape[-1], False
        D, A_log = d, a_log
        dt_layernorm = b_layernorm = c_layernorm = dt_proj = staticmethod(lambda each: each)
        rows = mx.concatenate([dt, b, c], axis=-1)

        def x_proj(self, given):
            return self.rows if given.ndim == 3 else self.rows[:, self.at]

    return Mixer()


def by_mlx_lm(kind: str, arrays: list) -> tuple[mx.array, mx.array]:
    if kind == "scan":
        return ssm.ssm_attn(*arrays, LIMITS)
    if kind != "selective":
        return gated_delta.gated_delta_ops(*arrays)
    mixer, state, found = mlx_lm_mixer(arrays, mamba.MambaBlock), arrays[6], []
    for t in range(arrays[0].shape[1]):
        mixer.at = t
        step = mamba.MambaBlock.ssm_step
        y, state = step(mixer, arrays[0][:, t], -mx.exp(arrays[1]), state)
        found.append(y)
    return mx.stack(found, axis=1), state


def by_float64(kind: str, arrays: list, **more) -> tuple[np.ndarray, np.ndarray]:
    if kind == "scan":
        return reference.state_space_scan(*arrays, limits=LIMITS, **more)
    if kind == "selective":
        return reference.selective_scan(*arrays)
    return reference.gated_delta(*arrays, **more)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_further_from_float64_than_mlx_lm(kind, dtype, has_state):
    op, make, options = KINDS[kind]
    arrays = make(dtype, tokens=150, has_state=has_state, **options)
    got, want, known = op(*arrays), by_float64(kind, arrays), by_mlx_lm(kind, arrays)
    for own, exact, theirs in zip(got, want, known, strict=True):
        assert own.shape == exact.shape and own.dtype == theirs.dtype
        # Where both are a sum in float32 that is rounded to 16 bits, the errors are almost equal.
        assert error_of(own, exact) <= error_of(theirs, exact) * (1 + 2**-10)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_outputs_are_float32_if_the_skips_are(dtype):
    arrays = reference.scan_arrays(dtype)
    arrays[4] = random(4, seed=5)
    got, theirs = scan_op(*arrays)[0], by_mlx_lm("scan", arrays)[0]
    want = by_float64("scan", arrays)[0]
    assert got.dtype == theirs.dtype == mx.float32
    assert error_of(got, want) <= error_of(theirs, want)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (64, 128), (130, 4), (12, 33)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_and_rows_of_any_number_against_float64(kind, sizes):
    op, make, options = KINDS[kind]
    names = {"scan": ("dims", "size"), "selective": ("channels", "size")}
    named = dict(zip(names.get(kind, ("values", "keys")), sizes, strict=True))
    arrays = make(**named, **options)
    for got, want in zip(op(*arrays), by_float64(kind, arrays), strict=True):
        np.testing.assert_allclose(float64(got), want, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_chunks_or_batches_against_float64(kind, dtype):
    op, make, options = KINDS[kind]
    arrays = make(dtype, batch=3, tokens=40, **options)
    want = op(*arrays)
    for ends in ([40], [1, 2, 17, 40], [*range(1, 41)]):
        state, outs, start = arrays[-1], [], 0
        for end in ends:
            out, state = op(*chunk_of(kind, arrays, state, slice(start, end)))
            outs.append(out)
            start = end
        assert bits_of(mx.concatenate(outs, axis=1), state) == bits_of(*want)
    for i in range(3):
        shared = SHARED.get(kind, ())
        alone = op(*[a if j in shared else a[i : i + 1] for j, a in enumerate(arrays)])
        assert bits_of(*alone) == bits_of(*[each[i : i + 1] for each in want])


@pytest.mark.parametrize("layout", ["inner", "strided", "transposed"])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_any_layout(kind, layout):
    op, make, options = KINDS[kind]
    arrays = make(**options)
    other = [laid_out(a, layout) if a.ndim > 1 else laid_out(a, "strided") for a in arrays]
    assert bits_of(*op(*other)) == bits_of(*op(*arrays))


def poisoned(array: mx.array, at: np.ndarray) -> mx.array:
    """NaN at these tokens."""
    axes = tuple(range(2, array.ndim))
    return mx.where(mx.expand_dims(mx.array(at), axes), mx.array(float("nan")), array)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "selective"])
def test_masked_tokens_leave_the_state(kind):
    op, make, options = KINDS[kind]
    arrays = make(**options)
    mask = np.random.default_rng(0).integers(0, 2, (2, 20)).astype(bool)
    mask[0, -3:], mask[1, :4] = False, False
    got = op(*arrays, mask=mx.array(mask))
    for own, exact in zip(got, by_float64(kind, arrays, mask=mask), strict=True):
        np.testing.assert_allclose(float64(own), exact, rtol=2e-5, atol=2e-5)
    places = tokens_of(kind)
    unseen = [a if i not in places else poisoned(a, ~mask) for i, a in enumerate(arrays)]
    assert bits_of(*op(*unseen, mask=mx.array(mask))) == bits_of(*got)
    padded = [ssm.ssm_attn, gated_delta.gated_delta_ops][kind != "scan"]
    own = (LIMITS, mx.array(mask)) if kind == "scan" else (mx.array(mask),)
    if kind == "scan":  # mlx-lm's own takes the positions of the last tokens from lengths
        own += (mx.array([17, 20]),)
        mask[:] = True
        mask[0, 17:] = False
        own = (LIMITS, mx.array(mask), mx.array([17, 20]))
        got = op(*arrays, mask=mx.array(mask))
    theirs = padded(*arrays, *own)
    np.testing.assert_allclose(got[1], theirs[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(got[0])[mask], np.array(theirs[0])[mask], atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_convolutions_against_float64(has_bias, dtype):
    for batch, tokens, channels, taps in [
        (1, 1, 5, 4),
        (3, 50, 37, 4),
        (2, 9, 64, 3),
        (1, 2, 8, 1),
        (2, 70, 1000, 3),  # several tiles of tokens
    ]:
        x = random(batch, tokens + taps - 1, channels, dtype=dtype, seed=1)
        weight = random(channels, taps, 1, dtype=dtype, seed=2)
        bias = random(channels, dtype=dtype, seed=3) if has_bias else None
        got = _ext.recurrent.depthwise_convolution(x, weight, bias)
        want = reference.convolution(x, weight, bias)
        theirs = mx.conv1d(x, weight, groups=channels)
        theirs = theirs if bias is None else theirs + bias
        assert got.shape == theirs.shape and got.dtype == dtype
        # A sum of a few products differs by less than a rounding from any other order of them.
        step = {mx.float32: 2**-24, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
        assert error_of(got, want) <= max(error_of(theirs, want), step * np.abs(want).max() / 4)
        for layout in ("inner", "strided", "transposed"):
            moved = _ext.recurrent.depthwise_convolution(laid_out(x, layout), weight, bias)
            assert bits_of(moved) == bits_of(got)
        last = _ext.recurrent.depthwise_convolution(x[-1:, -taps:], weight, bias)
        assert bits_of(last) == bits_of(got[-1:, -1:])


EXTREME = [-np.inf, -1e4, -80.0, -17.0, -1e-6, 0.0, 1e-6, 17.0, 89.0, 1e4, np.nan]


@pytest.mark.parametrize("kind", ["scan", "selective"])
def test_steps_and_rates_of_any_size_against_float64(kind):
    """In heads, or channels, each with one step and one rate; NaN stays in its own."""
    rates = [-90.0, -5.0, 0.0, 3.0, 80.0]
    steps, logs = (each.ravel() for each in np.meshgrid(EXTREME, rates))
    op, make, _ = KINDS[kind]
    sizes = {"heads": len(steps), "groups": 5} if kind == "scan" else {"channels": len(steps)}
    arrays = make(tokens=6, batch=1, **sizes)
    shape = arrays[5].shape
    arrays[5] = mx.array(np.broadcast_to(steps, shape).astype(np.float32))
    rows = logs if kind == "scan" else np.repeat(logs[:, None], arrays[1].shape[1], axis=1)
    arrays[1] = mx.array(rows.astype(np.float32))
    if kind == "scan":
        arrays[6] = mx.zeros(len(steps))
    with np.errstate(all="ignore"):
        want = by_float64(kind, arrays)
    axis = {0: 2, 1: 1}
    for i, (got, exact) in enumerate(zip(op(*arrays), want, strict=True)):
        own, exact = (np.moveaxis(each, axis[i], 0) for each in (float64(got), exact))
        assert np.isnan(exact).any() and not np.isnan(exact).all()
        for head, other in zip(own, exact, strict=True):
            scale = max(1.0, float(np.abs(other).max(initial=0.0, where=np.isfinite(other))))
            np.testing.assert_allclose(head, other, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_stay_as_they_are(kind):
    """A state is read again by later steps."""
    op, make, options = KINDS[kind]
    arrays = make(batch=1, tokens=3, **options)
    before = bits_of(*arrays)
    mx.eval(*op(*arrays))
    assert bits_of(*arrays) == before


@pytest.mark.heavy
@pytest.mark.parametrize("build", ["baseline", "avx2", "avx512"])
def test_every_build_passes_these_tests(build, pytestconfig):
    cases = pytestconfig.getoption("--cases")
    assert_build_passes(build, __file__, "float64 or layout", cases)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_mlx_s_operations(kind):
    op, make, options = KINDS[kind]
    arrays = make(batch=1, tokens=4, **options)
    tangent = random(*arrays[2].shape, seed=9)

    def total(function):
        return lambda *given: sum(mx.sum(mx.sin(each)) for each in function(*given))

    places = [*range(len(arrays))]
    found = mx.grad(total(op), argnums=places)(*arrays)
    step = 1e-3
    moved = [[*arrays[:2], arrays[2] + sign * step * tangent, *arrays[3:]] for sign in (1.0, -1.0)]
    high, low = (sum(np.sin(each).sum() for each in by_float64(kind, own)) for own in moved)
    slope = float(np.sum(float64(found[2]) * float64(tangent)))
    assert slope == pytest.approx((high - low) / (2 * step), rel=5e-3, abs=5e-3)
    rows = mx.vmap(lambda v: op(*arrays[:2], v, *arrays[3:])[0])(mx.stack([arrays[2]] * 2))
    np.testing.assert_allclose(rows[1], op(*arrays)[0], rtol=1e-4, atol=1e-4)


def test_wrong_arguments_are_refused():
    delta, scan = reference.delta_arrays(), reference.scan_arrays()
    selective = reference.selective_arrays()

    def changed(arrays, place, value):
        return [*arrays[:place], value, *arrays[place + 1 :]]

    x, weight = random(1, 9, 8), random(8, 4, 1)
    convolution = _ext.recurrent.depthwise_convolution
    half = mx.float16
    wrong = {
        "q has dtype float16": (gated_delta_op, changed(delta, 0, delta[0].astype(half))),
        "expected the same B, T and keys": (gated_delta_op, changed(delta, 0, delta[0][:, :3])),
        "a multiple of k's heads": (gated_delta_op, changed(delta, 2, delta[2][:, :, :3])),
        "gates have shape": (gated_delta_op, changed(delta, 3, delta[3][..., None])),
        "betas have shape": (gated_delta_op, changed(delta, 4, delta[4][:1])),
        r"state has shape \(2, 4, 37, 47\)": (gated_delta_op, changed(delta, 5, delta[5][..., 1:])),
        "b has dtype float16": (scan_op, changed(scan, 2, scan[2].astype(half))),
        r"d has shape \(3,\)": (scan_op, changed(scan, 4, scan[4][1:])),
        "a divisor of 4 heads": (scan_op, changed(scan, 2, mx.zeros((2, 20, 3, 48)))),
        "state has dtype float16": (scan_op, changed(scan, 7, scan[7].astype(half))),
        "another array has float16": (
            selective_op,
            changed(selective, 1, selective[1].astype(half)),
        ),
        r"dt has shape \(1, 20, 71\)": (selective_op, changed(selective, 5, selective[5][:1])),
        "at least 4 tokens": (convolution, [x[:, :3], weight]),
        r"expected \[B, T, C\] and \[C, K, 1\]": (convolution, [x, weight[1:]]),
    }
    for message, (op, arrays) in wrong.items():
        with pytest.raises(ValueError, match=message):
            op(*arrays)
    for op, arrays in ((gated_delta_op, delta), (scan_op, scan)):
        with pytest.raises(ValueError, match="mask has shape"):
            op(*arrays, mask=mx.ones((2, 3), mx.bool_))
        with pytest.raises(ValueError, match="mask has"):
            op(*arrays, mask=mx.ones((2, 20)))
