#include "csrc/pool_zeros.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "csrc/cpu/huge_pages.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

// Rows of blocks then begin with a cache line, and blocks of a page's size with a page.
constexpr uintptr_t kPage = 4096;

}  // namespace

mx::array pool_zeros(const std::vector<int>& sizes, mx::Dtype dtype, mx::StreamOrDevice stream) {
  const mx::Shape shape(sizes.begin(), sizes.end());
  const mx::Stream on = mx::to_stream(stream);
  if (on.device == mx::Device::gpu) {
    return mx::zeros(shape, dtype, on);
  }
  return mx::array(shape, dtype, std::make_shared<PoolZeros>(on), std::vector<mx::array>{});
}

// The kernel chooses the size of a page when it is first touched.
void PoolZeros::eval_cpu(const std::vector<mx::array>&, mx::array& out) {
  mx::allocator::Data memory = mx::allocator::malloc(out.nbytes() + kPage);
  const auto begin = reinterpret_cast<uintptr_t>(memory.buffer().raw_ptr());
  const auto offset = static_cast<int64_t>((kPage - begin % kPage) % kPage);
  out.set_data(std::move(memory), out.size(), out.strides(), out.flags(), offset);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.set_output_array(out);
  encoder.dispatch([data = out.data<std::byte>(), size = out.nbytes()] {
    cpu::use_huge_pages(data, size);
    std::memset(data, 0, size);
  });
}

void PoolZeros::eval_gpu(const std::vector<mx::array>&, mx::array&) {
  throw std::logic_error("[pool_zeros] a GPU makes its zeros itself");
}

}  // namespace mlx_paged
