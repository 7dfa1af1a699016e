// Prints what `gather_blocks` gives to MLX's gather. Each line of standard input is a case:
//
//   H N S D  STRIDES*4  B M     of the cache [H, N, S, D], and of the block tables [B, M]
//
// The line that answers it has the elements that the gather takes at an index and, of each of its
// inputs, shape, strides, whether the flags say that it is row-contiguous, and size.
#include <iostream>
#include <sstream>

#include "csrc/pool_reads.cpp"

namespace mlx_paged {

bool is_transforming() { return false; }
void register_pool_read(const mx::array&, mx::Stream) {}
std::string printable(const mx::Shape&) { return ""; }

}  // namespace mlx_paged

namespace {

namespace mx = mlx::core;

// An array without memory.
mx::array array(const mx::Shape& shape, const mx::Strides& strides, bool is_row_contiguous) {
  mx::array a(shape, mx::int32, nullptr, {});
  a.set_data(mx::allocator::Data(mx::allocator::Buffer(nullptr), [](mx::allocator::Buffer) {}),
             a.size(), strides, {is_row_contiguous, is_row_contiguous, false});
  return a;
}

mx::array array(const mx::Shape& shape) {
  return array(shape, mx::array(shape, mx::int32, nullptr, {}).strides(), true);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    mx::Shape shape(4);
    mx::Strides strides(4);
    int batch, columns;
    for (auto& length : shape) words >> length;
    for (auto& stride : strides) words >> stride;
    words >> batch >> columns;
    const auto [gathered, read] =
        mlx_paged::gather_call({array(shape, strides, false), array({shape[0]}),
                                array({batch, columns}), array({batch, shape[0], columns})},
                               mx::default_stream(mx::Device::cpu));
    std::cout << gathered.size() / (int64_t{batch} * shape[0] * columns);
    for (const mx::array& a : read) {
      std::cout << " | " << a.shape() << " ; ";
      for (const auto stride : a.strides()) std::cout << stride << " ";
      std::cout << "; " << a.flags().row_contiguous << " ; " << a.size();
    }
    std::cout << "\n";
  }
}
