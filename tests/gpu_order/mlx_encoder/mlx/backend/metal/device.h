// Stands in for MLX's header of this name where there is no Metal. The command encoder keeps the
// books of MLX 0.32.4's (mlx/backend/metal/device.cpp, same names) and prints what it does with
// them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "mlx/array.h"

namespace NS {

template <typename T>
T* RetainPtr(T* object) {
  return object;
}
template <typename T>
T* TransferPtr(T* object) {
  return object;
}
struct AutoreleasePool {
  static AutoreleasePool* alloc() {
    static AutoreleasePool pool;
    return &pool;
  }
  AutoreleasePool* init() { return this; }
};

}  // namespace NS

namespace MTL {

struct CommandBuffer {
  void waitUntilCompleted() const { std::cout << "completed\n"; }
};
class Buffer;
class Library;
struct ComputePipelineState {
  size_t maxTotalThreadsPerThreadgroup() const { return 1024; }
};
struct Size {
  Size(size_t, size_t, size_t) {}
};
enum DataType { DataTypeBool, DataTypeInt };

}  // namespace MTL

namespace mlx::core::metal {

using MTLFCList = std::vector<std::tuple<const void*, MTL::DataType, size_t>>;

// One queue's encoders, one after the other, none of them executed.
class CommandEncoder {
 public:
  void set_buffer(const MTL::Buffer* buf, int idx, int64_t) {
    all_inputs_.insert(buf);
    all_outputs_.insert(buf);
    bound_[idx] = buf;
  }

  void set_input_array(const array& a, int idx) {
    const void* buf = a.buffer().ptr();
    if (all_inputs_.insert(buf).second) {
      buffer_sizes_ += a.data_size();
    }
    next_inputs_.insert(buf);
    needs_barrier_ |= prev_outputs_.count(buf) > 0;
    bound_[idx] = buf;
  }

  void set_output_array(array& a, int idx) {
    set_input_array(a, idx);
    const void* buf = a.buffer().ptr();
    all_outputs_.insert(buf);
    if (is_concurrent_) {
      concurrent_outputs_.insert(buf);
      return;
    }
    next_outputs_.insert(buf);
    needs_barrier_ |= prev_inputs_.count(buf) > 0;
  }

  struct ConcurrentContext {
    ConcurrentContext(CommandEncoder& encoder) : encoder(encoder) { encoder.is_concurrent_ = true; }
    ~ConcurrentContext() {
      encoder.is_concurrent_ = false;
      encoder.prev_outputs_.merge(encoder.concurrent_outputs_);
      encoder.concurrent_outputs_.clear();
    }
    CommandEncoder& encoder;
  };

  void add_temporary(array a) { temporaries_.push_back(std::move(a)); }
  void set_compute_pipeline_state(MTL::ComputePipelineState*) {}
  template <typename T>
  void set_bytes(const T*, int, int) {}
  void dispatch_threadgroups(MTL::Size, MTL::Size) { dispatch(); }
  void dispatch_threads(MTL::Size, MTL::Size) { dispatch(); }

  const MTL::CommandBuffer* get_command_buffer() const { return &buffers_[num_committed_ % 2]; }
  // The handlers run when whoever waits for the buffer may have gone on.
  void commit(std::function<void()> completion = nullptr) {
    ++num_committed_;
    std::cout << "commit\n";
    if (completion) {
      std::thread([this, completion] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        has_error_ = fails;
        std::cout << "handled\n";
        completion();
      }).detach();
    }
  }

  // Opens an encoder, which is when MLX throws the error of an earlier command buffer, once.
  void barrier() {
    if (has_error_.exchange(false)) {
      throw std::runtime_error("[METAL] Command buffer execution failed");
    }
    is_open_ = true;
    std::cout << "opened\n";
  }
  bool fails = false;

  // Prints the numbers of the earlier encoders that this one waits for: all of them if it is open
  // and `wait_in_flight`.
  void end_encoding(bool wait_in_flight = false) {
    for (const array& t : temporaries_) {
      all_inputs_.erase(t.buffer().ptr());
      all_outputs_.erase(t.buffer().ptr());
    }
    std::set<int> waiting_on;
    for (const void* in : all_inputs_) {
      if (auto it = prev_ce_outputs_.find(in); it != prev_ce_outputs_.end()) {
        waiting_on.insert(it->second);
      }
    }
    for (int fence = 0; is_open_ && wait_in_flight && fence < fence_; ++fence) {
      waiting_on.insert(fence);
    }
    is_open_ = false;
    for (const void* out : all_outputs_) {
      prev_ce_outputs_[out] = fence_;
    }
    std::cout << "end";
    for (const int fence : waiting_on) {
      std::cout << " " << fence;
    }
    std::cout << "\ncounted " << buffer_sizes_ << "\n";
    ++fence_;
    buffer_sizes_ = 0;
    needs_barrier_ = false;
    temporaries_.clear();
    for (auto* set : {&prev_inputs_, &prev_outputs_, &next_inputs_, &next_outputs_, &all_inputs_,
                      &all_outputs_}) {
      set->clear();
    }
  }

 private:
  std::atomic<bool> has_error_ = false;
  using Buffers = std::set<const void*>;

  void dispatch() {
    if (needs_barrier_) {
      std::cout << "barrier\n";
      needs_barrier_ = false;
      prev_inputs_.swap(next_inputs_);
      prev_outputs_.swap(next_outputs_);
    } else {
      prev_inputs_.insert(next_inputs_.begin(), next_inputs_.end());
      prev_outputs_.insert(next_outputs_.begin(), next_outputs_.end());
    }
    next_inputs_.clear();
    next_outputs_.clear();
    std::cout << "dispatch";
    for (const auto& [index, buf] : bound_) {
      std::cout << " " << index << ":" << reinterpret_cast<intptr_t>(buf);
    }
    std::cout << "\n";
    bound_.clear();
  }

  MTL::CommandBuffer buffers_[2];
  int num_committed_ = 0;
  std::map<int, const void*> bound_;
  std::map<const void*, int> prev_ce_outputs_;
  std::vector<array> temporaries_;
  Buffers prev_inputs_, prev_outputs_, next_inputs_, next_outputs_, all_inputs_, all_outputs_;
  size_t buffer_sizes_ = 0;
  Buffers concurrent_outputs_;
  bool needs_barrier_ = false, is_concurrent_ = false, is_open_ = false;
  int fence_ = 0;
};

struct Device {
  MTL::Library* get_library(const std::string&, const std::function<std::string()>&) {
    return nullptr;
  }
  MTL::ComputePipelineState* get_kernel(const std::string&, MTL::Library*, const std::string&,
                                        const MTLFCList&) {
    return &state;
  }
  MTL::ComputePipelineState state;
};

inline Device& device(mlx::core::Device) {
  static Device device;
  return device;
}

inline CommandEncoder& get_command_encoder(Stream) {
  static CommandEncoder encoder;
  return encoder;
}

}  // namespace mlx::core::metal
