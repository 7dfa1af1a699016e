#include "csrc/factor_files.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <stdexcept>

#include "csrc/validate.h"
#include "mlx/allocator.h"

namespace mlx_paged {

namespace {

// Where a factor begins in the bytes of all.
constexpr size_t kAlignment = 64;

// The bytes of all: an array has no longer axis.
constexpr size_t kMostBytes = std::numeric_limits<mx::ShapeElem>::max();

// Rows of a tensor that are transposed together: their elements fill a cache line.
constexpr int64_t kRowsTogether = 32;

// Calls body with a value of the type that a file names.
template <typename Body>
void for_stored(const std::string& dtype, Body body) {
  if (dtype == "F64") {
    body(double{});
  } else if (dtype == "F32") {
    body(float{});
  } else if (dtype == "F16") {
    body(mx::float16_t{});
  } else {
    require(dtype == "BF16", "read_factors", "a tensor has type ", dtype,
            ": expected F64, F32, F16 or BF16");
    body(mx::bfloat16_t{});
  }
}

// Calls body with a value of the type of an array.
template <typename Body>
void for_dtype(mx::Dtype dtype, Body body) {
  switch (dtype) {
    case mx::float32:
      return body(float{});
    case mx::float16:
      return body(mx::float16_t{});
    default:
      require(dtype == mx::bfloat16, "read_factors", "dtype is ", dtype,
              ": expected float32, float16 or bfloat16");
      return body(mx::bfloat16_t{});
  }
}

// One matrix [rows, columns], times a number. Returns whether all numbers are finite.
template <typename From, typename To>
bool convert(const From* from, int64_t rows, int64_t columns, bool transposes, float scale,
             To* to) {
  bool are_finite = true;
  const auto convert_one = [&](int64_t r, int64_t c) {
    const To value = static_cast<To>(static_cast<float>(from[r * columns + c]) * scale);
    are_finite &= std::isfinite(static_cast<float>(value));
    to[transposes ? c * rows + r : r * columns + c] = value;
  };
  for (int64_t first = 0; first < rows; first += kRowsTogether) {
    const int64_t end = std::min(rows, first + kRowsTogether);
    if (transposes) {
      for (int64_t c = 0; c < columns; ++c) {
        for (int64_t r = first; r < end; ++r) {
          convert_one(r, c);
        }
      }
      continue;
    }
    for (int64_t r = first; r < end; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        convert_one(r, c);
      }
    }
  }
  return are_finite;
}

mx::Shape shape_of(const StoredFactor& stored) {
  const auto& sizes = std::get<std::vector<int>>(stored);
  return {sizes.begin(), sizes.end()};
}

mx::Shape swapped(mx::Shape shape, bool transposes) {
  if (transposes) {
    std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  }
  return shape;
}

size_t elements_of(const mx::Shape& shape) {
  size_t count = 1;
  for (const auto size : shape) {
    count *= static_cast<size_t>(size);
  }
  return count;
}

// A part of an array of bytes.
mx::array part_of(const mx::array& bytes, size_t begin, const mx::Shape& shape, mx::Dtype dtype) {
  mx::array part(shape, dtype, nullptr, Arrays{});
  const mx::array::Flags flags = {true, true, false};
  part.copy_shared_buffer(bytes, part.strides(), flags, part.size(), begin / dtype.size());
  part.set_status(mx::array::Status::available);
  return part;
}

}  // namespace

std::tuple<mx::array, Arrays, int64_t> read_factors(const std::string& path,
                                                    const std::vector<StoredFactor>& stored) {
  std::vector<size_t> begins;
  size_t total = 0;
  for (const StoredFactor& each : stored) {
    const mx::Shape shape = shape_of(each);
    require(shape.size() >= 2, "read_factors", "a tensor has shape ", shape,
            ": expected [..., rows, columns]");
    begins.push_back(total);
    const size_t size = elements_of(shape) * std::get<mx::Dtype>(each).size();
    total += (size + kAlignment - 1) / kAlignment * kAlignment;
  }
  require(total <= kMostBytes, "read_factors", "the factors take ", total,
          " bytes: expected at most ", kMostBytes);
  mx::array bytes(mx::allocator::malloc(total), {static_cast<mx::ShapeElem>(total)}, mx::uint8);
  std::memset(bytes.data<std::byte>(), 0, total);
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("[read_factors] " + path + " cannot be opened");
  }
  Arrays factors;
  int64_t first_bad = -1;
  std::vector<std::byte> read;
  for (size_t i = 0; i < stored.size(); ++i) {
    const mx::Shape shape = shape_of(stored[i]);
    const mx::Dtype dtype = std::get<mx::Dtype>(stored[i]);
    const bool transposes = std::get<bool>(stored[i]);
    const auto scale = static_cast<float>(std::get<double>(stored[i]));
    const size_t count = elements_of(shape);
    const int64_t rows = shape[shape.size() - 2], columns = shape.back();
    bool are_finite = true;
    std::byte* const to = bytes.data<std::byte>() + begins[i];
    for_stored(std::get<std::string>(stored[i]), [&]<typename From>(From) {
      read.resize(count * sizeof(From));
      file.seekg(static_cast<std::streamoff>(std::get<uint64_t>(stored[i])));
      file.read(reinterpret_cast<char*>(read.data()), static_cast<std::streamsize>(read.size()));
      require(static_cast<bool>(file), "read_factors", "the file is shorter than its tensors");
      for_dtype(dtype, [&]<typename To>(To) {
        for (size_t at = 0; at < count; at += rows * columns) {
          are_finite &= convert(reinterpret_cast<const From*>(read.data()) + at, rows, columns,
                                transposes, scale, reinterpret_cast<To*>(to) + at);
        }
      });
    });
    if (!are_finite && first_bad < 0) {
      first_bad = static_cast<int64_t>(i);
    }
    factors.push_back(part_of(bytes, begins[i], swapped(shape, transposes), dtype));
  }
  return {bytes, factors, first_bad};
}

void write_slot(const Arrays& stacks, const std::vector<OptionalArray>& factors, int64_t slot) {
  require(stacks.size() == factors.size(), "write_slot", "there are ", stacks.size(),
          " stacks and ", factors.size(), " factors: expected as many");
  for (size_t i = 0; i < stacks.size(); ++i) {
    mx::array stack = stacks[i];
    const OptionalArray& factor = factors[i];
    require(stack.ndim() >= 3 && 0 <= slot && slot < stack.shape(0), "write_slot", "slot is ", slot,
            ": expected a row of a stack of shape ", stack.shape());
    const size_t row_bytes = stack.itemsize() * elements_of(stack.shape()) / stack.shape(0);
    const size_t matrix_bytes = stack.itemsize() * stack.shape(-1) * stack.shape(-2);
    std::byte* to = stack.data<std::byte>() + slot * row_bytes;
    if (!factor) {
      std::memset(to, 0, row_bytes);
      continue;
    }
    mx::Shape row(stack.shape().begin() + 1, stack.shape().end());
    row[row.size() - 2] = factor->shape(-2);  // of fewer ranks
    require(factor->shape() == row && factor->dtype() == stack.dtype() &&
                factor->shape(-2) <= stack.shape(-2) && factor->flags().row_contiguous,
            "write_slot", "a factor has shape ", factor->shape(), " and dtype ", factor->dtype(),
            ": expected those of a row of a stack of shape ", stack.shape());
    const size_t bytes = factor->itemsize() * factor->shape(-1) * factor->shape(-2);
    const auto* from = factor->data<std::byte>();
    for (size_t at = 0; at < row_bytes; at += matrix_bytes, from += bytes) {
      std::memcpy(to + at, from, bytes);
      std::memset(to + at + bytes, 0, matrix_bytes - bytes);
    }
  }
}

}  // namespace mlx_paged
