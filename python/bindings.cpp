#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/ops.h"
#include "python/array_views.h"
#include "python/layer_bindings.h"
#include "python/plan_bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr const char* kModuleDoc =
    R"(Compiled ops of mlx_paged.

Import ``mlx.core`` first: it loads libmlx and registers ``mlx.core.array``.

Dimensions: B sequences, L query tokens each, H query heads, H_kv KV heads, D key head dimension,
D_v value head dimension, N blocks in the pool, S tokens per block, M columns of a block table.
One layer's pool is ``k_cache [H_kv, N, S, D]`` and ``v_cache [H_kv, N, S, D_v]``, both float32,
float16 or bfloat16, in any layout whose last axis is dense; it is never copied.)";

constexpr const char* kPagedAttentionDoc =
    R"(Attention over keys and values scattered in the block pool.

Args:
    q: ``[B, H, L, D]`` float32, float16 or bfloat16, any layout. Query l of sequence b sits at
        position ``context_lens[b] - L + l``; one at a negative position yields zeros.
    k_cache, v_cache: the pool. Its dtype may differ from q's.
    block_tables: ``[B, M]`` int32, the physical block of each logical block. Entries past
        ``ceil(context_lens[b] / S)`` are never read; keys of an id outside ``[0, N)`` are not
        attended.
    context_lens: ``[B]`` int32, KV tokens visible to the sequence, this step's included; clamped
        to ``[0, M * S]``.
    scale: multiplies q.k.
    causal: a query sees keys up to its own position; False: all ``context_lens[b]`` keys.
    kv_head_mapping: ``[H]`` int32, the KV head of each query head; default ``h // (H // H_kv)``.
        A head mapped outside ``[0, H_kv)`` yields zeros.
    rope_freqs: ``[B, L, R/2]`` float, or ``[B, R/2]`` if L is 1: rotation angles in radians of
        each query; rotates q's dims ``(i, i + R/2)``, dims from R on pass through. k is not
        rotated.
    attn_mask: broadcastable to ``[B, H, L, M*S]``, last axis of that size; bool (True: attend) or
        float (added to the score, after softcap).
    window: a query at position p sees keys in ``(p - window, p]``.
    sinks: ``[H]`` float, per-head logit that takes part in the softmax denominator only.
    softcap: score becomes ``softcap * tanh(scale * q.k / softcap)``, before ALiBi and mask.
    alibi_slopes: ``[H]`` float, adds ``slope * (key position - query position)``.
    return_attn: also return the softmax weights.
    stream: stream or device; CPU only.

Returns:
    ``[B, H, L, D_v]`` in q's dtype; with return_attn a pair of it and the softmax weights
    ``[B, H, L, M*S]`` float32, zero where not attended. A query that sees no key yields zeros.

Raises:
    ValueError: an argument's rank, shape or dtype does not fit.

Softmax is streamed over blocks with a running maximum, denominator and accumulator in float32
(Milakov and Gimelshein 2018; Kwon et al. 2023, section 4.3).)";

constexpr const char* kWriteKVDoc =
    R"(Write rows of keys and values to their slots in the pool, in place.

Args:
    k, v: ``[T, H_kv, D]`` and ``[T, H_kv, D_v]`` of the cache's dtype, any layout.
    k_cache, v_cache: the pool.
    slot_mapping: ``[T]`` int32, ``block * S + offset`` of each row; rows whose slot is outside
        ``[0, N * S)`` are skipped. Of rows with equal slots the last one stays.
    stream: stream or device; CPU only.

Returns:
    New handles of both caches that share the pool's buffers. The write happens whatever other
    references exist, so use only these handles afterwards.

Raises:
    ValueError: an argument's rank, shape or dtype does not fit.)";

constexpr const char* kCopyBlocksDoc =
    R"(Copy whole blocks within the pool, in place.

Args:
    k_cache, v_cache: the pool.
    block_pairs: ``[P, 2]`` int32, (source, destination) physical blocks, copied in order; pairs
        with an id outside ``[0, N)`` are skipped.
    stream: stream or device; CPU only.

Returns:
    New handles of both caches that share the pool's buffers; use only these afterwards.

Raises:
    ValueError: an argument's rank, shape or dtype does not fit.)";

constexpr const char* kGatherBlocksDoc =
    R"(Keys or values of a batch's sequences in one piece, as a graph of MLX's own ops.

Args:
    cache: the pool's keys or values.
    block_tables: ``[B, M]`` integers.
    num_tokens: of each sequence, at most ``M * S``.

Returns:
    ``[B, H_kv, num_tokens, D]``, on the current device.

Raises:
    ValueError: a rank or the number does not fit.)";

constexpr const char* kPoolZerosDoc =
    R"(Zeros for a layer's pool.

On a CPU under Linux, unless huge pages are switched off there, every stretch of 2 MiB that begins
at a multiple of 2 MiB and lies wholly within the array is one huge page: random blocks are read
faster. On any CPU the array begins on a page, so that no row begins within a cache line. It takes
the memory of any other of its size and at most 4 KiB more, all of it at once, since zeros are
written.

Args:
    shape: of the array.
    dtype: of the array.
    stream: stream or device; a GPU gives plain zeros.)";

constexpr const char* kCheckTablesDoc =
    R"(Check the data of block tables on the host.

Args:
    op: name that starts the error message.
    block_tables: ``[B, M]`` int32.
    context_lens: ``[B]`` int32.
    num_blocks: N, blocks in the pool.
    block_size: S, tokens per block.

Of arrays that are not evaluated yet only shapes and dtypes are checked: nothing waits.

Raises:
    ValueError: a shape or dtype does not fit, a context length outside ``[0, M * S]``, or a block id outside ``[0, N)`` among
        the entries that a context reads.)";

constexpr const char* kCpuFeaturesDoc =
    R"(Name of the CPU kernels' build in use: "baseline", "avx2", "avx512" or "avx512_bf16".

The last one multiplies pairs of bfloat16: decodes of bfloat16 queries over a bfloat16 pool round
their softmax weights to it, as they do their output.

The environment variable MLX_PAGED_CPU, read at import, chooses one; the default is the fastest
that the machine supports.)";

}  // namespace

NB_MODULE(_ext, m) {
  m.doc() = kModuleDoc;

  // A bad environment variable fails the import, not a task on MLX's stream thread.
  mlx_paged::cpu::active_kernel();
  mlx_paged::cpu::num_threads();

  m.def("paged_attention", &mlx_paged::paged_attention, "q"_a, "k_cache"_a, "v_cache"_a,
        "block_tables"_a, "context_lens"_a, nb::kw_only(), "scale"_a, "causal"_a = true,
        "kv_head_mapping"_a = nb::none(), "rope_freqs"_a = nb::none(), "attn_mask"_a = nb::none(),
        "window"_a = nb::none(), "sinks"_a = nb::none(), "softcap"_a = nb::none(),
        "alibi_slopes"_a = nb::none(), "return_attn"_a = false, "stream"_a = nb::none(),
        kPagedAttentionDoc);
  m.def("write_kv", &mlx_paged::write_kv, "k"_a, "v"_a, "k_cache"_a, "v_cache"_a, "slot_mapping"_a,
        nb::kw_only(), "stream"_a = nb::none(), kWriteKVDoc);
  m.def("copy_blocks", &mlx_paged::copy_blocks, "k_cache"_a, "v_cache"_a, "block_pairs"_a,
        nb::kw_only(), "stream"_a = nb::none(), kCopyBlocksDoc);
  m.def("gather_blocks", &mlx_paged::gather_blocks, "cache"_a, "block_tables"_a, "num_tokens"_a,
        kGatherBlocksDoc);
  m.def("take_from_pool", &mlx_paged::take_from_pool, "rows"_a, "indices"_a,
        "What ``mx.take(rows, indices, axis=0)`` gives, of a pool's memory: on a GPU, writes to "
        "the pool that are encoded later wait for it.");
  m.def("pool_zeros", &mlx_paged::pool_zeros, "shape"_a, "dtype"_a, nb::kw_only(),
        "stream"_a = nb::none(), kPoolZerosDoc);
  m.def("check_tables", &mlx_paged::check_tables, "op"_a, "block_tables"_a, "context_lens"_a,
        "num_blocks"_a, "block_size"_a, kCheckTablesDoc);
  m.def("cpu_features", &mlx_paged::cpu::active_kernel_name, kCpuFeaturesDoc);
  m.def("supported_kernels", &mlx_paged::cpu::supported_kernel_names,
        "Names of the CPU kernels' builds that this machine can run, slowest first.");
  m.def("num_threads", &mlx_paged::cpu::num_threads,
        "Threads that CPU kernels use: MLX_PAGED_NUM_THREADS, read at import, or the hardware's.");

  mlx_paged::bind_array_views(m);
  mlx_paged::bind_layers(m);
  mlx_paged::bind_plans(m);
}
