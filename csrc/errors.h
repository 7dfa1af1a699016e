// Errors in the form "[op] argument is X: expected Y".
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "mlx/array.h"

namespace mlx_paged {

template <typename Error = std::invalid_argument, typename... Parts>
[[noreturn]] void fail(const std::string& op, const Parts&... parts) {
  std::ostringstream message;
  message << "[" << op << "] ";
  (message << ... << parts);
  throw Error(message.str());
}

// A shape in Python's notation.
inline std::string text(const mlx::core::Shape& shape) {
  std::ostringstream out;
  out << "(";
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    out << (axis ? ", " : "") << shape[axis];
  }
  out << (shape.size() == 1 ? ",)" : ")");
  return out.str();
}

}  // namespace mlx_paged
