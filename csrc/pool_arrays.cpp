// Arrays for pools. On a CPU they begin at a page and use huge pages; Linux also reserves address
// space, so that they grow without a copy.
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "csrc/cpu/mlx_args.h"
#include "csrc/ops.h"
#include "mlx/allocator.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mlx_paged {

namespace {

// A pool on a CPU begins at a multiple of this: rows then begin with a cache line, and blocks of
// this size with a page.
constexpr size_t kPage = 4096;

// Asks Linux to back the huge pages (of x86-64, and of AArch64 with pages of 4 KiB) that lie wholly
// within [data, data + size). Linux may refuse; other systems are not asked.
void use_huge_pages([[maybe_unused]] std::byte* data, [[maybe_unused]] size_t size) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 1 << 21;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (begin + size) / kHugePage * kHugePage;
  if (first < end) {
    madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
  }
#endif
}

// Address space of zeros, which takes memory where it is touched. A page is before the data: its
// last word is where MLX's CPU allocator keeps the size of a buffer.
struct Reservation {
  size_t capacity;
  size_t used;
};

// All reservations, by the pointer in their buffer. MLX's counters of memory do not know them.
struct Reservations {
  std::mutex mutex;
  std::unordered_map<const void*, Reservation> of_buffers;
};

Reservations& reservations() {
  static auto* const all = new Reservations();  // outlives the arrays of MLX's static objects
  return *all;
}

#if defined(__linux__)
// Whether the data of a buffer follows the word that it points to. In MLX's builds for GPUs a
// buffer is an object of the device.
bool buffers_are_pointers() {
  static const bool are_pointers = [] {
    const mx::allocator::Data data = mx::allocator::malloc(kPage);
    mx::allocator::Buffer buffer = data.buffer();
    return buffer.raw_ptr() == static_cast<size_t*>(buffer.ptr()) + 1;
  }();
  return are_pointers;
}

void release(mx::allocator::Buffer buffer) {
  const std::lock_guard lock(reservations().mutex);
  const auto found = reservations().of_buffers.find(buffer.ptr());
  std::byte* data = static_cast<std::byte*>(buffer.ptr()) + sizeof(size_t);
  munmap(data - kPage, found->second.capacity + kPage);
  reservations().of_buffers.erase(found);
}

// Data for `used` bytes that may grow to `capacity`; none if the system or MLX's build refuses.
std::optional<mx::allocator::Data> reserve(size_t capacity, size_t used) {
  void* base = buffers_are_pointers() ? mmap(nullptr, capacity + kPage, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                                      : MAP_FAILED;
  if (base == MAP_FAILED) {
    return std::nullopt;
  }
  auto* header = reinterpret_cast<size_t*>(static_cast<std::byte*>(base) + kPage) - 1;
  *header = capacity;
  const std::lock_guard lock(reservations().mutex);
  reservations().of_buffers.emplace(header, Reservation{capacity, used});
  return mx::allocator::Data(mx::allocator::Buffer(header), release);
}
#else
std::optional<mx::allocator::Data> reserve(size_t, size_t) { return std::nullopt; }
#endif

// Zeros on a CPU. The system chooses the size of a page when it is first touched.
class PoolZeros : public mx::Primitive {
 public:
  PoolZeros(mx::Stream stream, size_t capacity) : mx::Primitive(stream), capacity_(capacity) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    if (auto memory = reserve(std::max(capacity_, out.nbytes()), out.nbytes())) {
      out.set_data(std::move(*memory));
      use_huge_pages(out.data<std::byte>(), out.nbytes());
      return;
    }
    mx::allocator::Data memory = mx::allocator::malloc(out.nbytes() + kPage);
    const auto begin = reinterpret_cast<uintptr_t>(memory.buffer().raw_ptr());
    const auto offset = static_cast<int64_t>((kPage - begin % kPage) % kPage);
    out.set_data(std::move(memory), out.size(), out.strides(), out.flags(), offset);
    cpu::encoder_for(stream(), inputs, outputs)
        .dispatch([data = out.data<std::byte>(), size = out.nbytes()] {
          use_huge_pages(data, size);
          std::memset(data, 0, size);
        });
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::logic_error("[pool_zeros] this primitive runs on CPUs only");
  }

  const char* name() const override { return "PoolZeros"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return capacity_ == static_cast<const PoolZeros&>(other).capacity_;
  }

 private:
  size_t capacity_;
};

// An array that begins with its input, in the same memory.
class PoolGrown : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    mx::array::Flags flags{};
    flags.contiguous = flags.row_contiguous = true;
    out.copy_shared_buffer(inputs[0], out.strides(), flags, out.size());
    {
      const std::lock_guard lock(reservations().mutex);
      reservations().of_buffers.at(out.buffer().ptr()).used = out.nbytes();
    }
    use_huge_pages(out.data<std::byte>(), out.nbytes());
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::logic_error("[grown_in_place] this primitive runs on CPUs only");
  }

  const char* name() const override { return "PoolGrown"; }
};

}  // namespace

mx::array pool_zeros(const std::vector<int>& sizes, mx::Dtype dtype, int64_t capacity,
                     mx::StreamOrDevice stream) {
  const mx::Shape shape(sizes.begin(), sizes.end());
  const mx::Stream on = mx::to_stream(stream);
  if (on.device == mx::Device::gpu) {
    return mx::zeros(shape, dtype, on);
  }
  size_t bytes = capacity > 0 ? capacity * size_of(dtype) : 0;
  for (size_t axis = 1; axis < shape.size(); ++axis) {
    bytes *= shape[axis];
  }
  return mx::array(shape, dtype, std::make_shared<PoolZeros>(on, bytes), Arrays{});
}

OptionalArray grown_in_place(const mx::array& blocks, int num_blocks, mx::StreamOrDevice stream) {
  const mx::Stream on = mx::to_stream(stream);
  const bool is_known = blocks.status() != mx::array::Status::unscheduled && !blocks.is_tracer();
  if (on.device == mx::Device::gpu || !is_known || blocks.offset() != 0 ||
      !blocks.flags().row_contiguous) {
    return std::nullopt;
  }
  mx::Shape shape = blocks.shape();
  shape[0] = num_blocks;
  const size_t block_bytes = blocks.strides(0) * blocks.itemsize();
  {
    const std::lock_guard lock(reservations().mutex);
    const auto found = reservations().of_buffers.find(blocks.buffer().ptr());
    if (found == reservations().of_buffers.end() ||
        num_blocks * block_bytes > found->second.capacity) {
      return std::nullopt;
    }
  }
  return mx::array(shape, blocks.dtype(), std::make_shared<PoolGrown>(on), Arrays{blocks});
}

size_t reserved_bytes() {
  const std::lock_guard lock(reservations().mutex);
  size_t total = 0;
  for (const auto& [buffer, reservation] : reservations().of_buffers) {
    total += reservation.used;
  }
  return total;
}

}  // namespace mlx_paged
