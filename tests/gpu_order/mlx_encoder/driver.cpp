// Encodes the launches that standard input describes, on the encoder beside this file:
//
//   input BUFFER ELEMENTS          of the next op; buffers are numbers
//   output BUFFER ELEMENTS         likewise
//   scratch BYTES                  likewise
//   launch N (INDEX ROLE WHICH)*   a launch of the next op, with its N bindings
//   encode                         the op
//   read BUFFER ELEMENTS           an op of MLX's own that reads memory of a pool
//   end                            of the command encoder
//   finish                         wait for the end of all this
//   finish_elsewhere               on another thread
//   two_ends                       of which a command buffer of the first fails before the second
//   fail                           a command buffer fails before the next "finish" ends
//   commit                         the command buffer
#include <iostream>
#include <map>
#include <string>
#include <thread>

#include "csrc/metal/plans.h"
#include "mlx/backend/metal/device.h"

namespace mlx_paged {

std::string library_source(const LaunchPlan&) { return ""; }
std::string library_name(const LaunchPlan&) { return ""; }

namespace {

const mx::Stream kStream(0, mx::Device(mx::Device::gpu));

// An array in a buffer that is a number and no memory.
mx::array next_array(std::istream& in) {
  int buffer, elements;
  in >> buffer >> elements;
  mx::array a(mx::Shape{elements}, mx::float32, nullptr, std::vector<mx::array>{});
  auto* address = reinterpret_cast<void*>(static_cast<intptr_t>(buffer));
  a.set_data(mx::allocator::Data(mx::allocator::Buffer(address), [](mx::allocator::Buffer) {}),
             elements, a.strides(), a.flags());
  return a;
}

BufferBinding::Role role_of(const std::string& name) {
  using Role = BufferBinding::Role;
  const std::map<std::string, Role> roles = {{"input", Role::kInput},
                                             {"output", Role::kOutput},
                                             {"pool_read", Role::kPoolRead},
                                             {"pool_write", Role::kPoolWrite},
                                             {"scratch", Role::kScratch}};
  return roles.at(name);
}

LaunchPlan next_launch(std::istream& in) {
  LaunchPlan plan;
  plan.grid = plan.threadgroup = {1, 1, 1};
  plan.set_params(30, 0);
  int count;
  in >> count;
  for (int i = 0; i < count; ++i) {
    int index, which;
    std::string role;
    in >> index >> role >> which;
    plan.buffers.push_back({index, role_of(role), which});
  }
  return plan;
}

void read(std::istream& in) {
  const mx::array pool = next_array(in);
  register_pool_read(pool, kStream);
  auto& encoder = mx::metal::get_command_encoder(kStream);
  encoder.set_input_array(pool, 0);
  encoder.dispatch_threads({1, 1, 1}, {1, 1, 1});
}

void tell(const std::function<void()>& wait) {
  try {
    wait();
  } catch (const std::runtime_error&) {
    std::cout << "raised\n";
  }
}

void finish(bool on_another_thread) {
  const auto wait = end_of_work(kStream);
  std::cout << "launched\n";
  on_another_thread ? std::thread(tell, wait).join() : tell(wait);
}

void two_ends() {
  auto& encoder = mx::metal::get_command_encoder(kStream);
  encoder.fails = true;
  const auto first = end_of_work(kStream);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // its handler has run
  encoder.fails = false;
  const auto second = end_of_work(kStream);
  tell(first);
  tell(second);
}

void run(std::istream& in) {
  LaunchPlans plans;
  std::vector<mx::array> inputs, outputs;
  for (std::string word; in >> word;) {
    if (word == "input") {
      inputs.push_back(next_array(in));
    } else if (word == "output") {
      outputs.push_back(next_array(in));
    } else if (word == "scratch") {
      in >> plans.scratch_bytes.emplace_back();
    } else if (word == "launch") {
      plans.launches.push_back(next_launch(in));
    } else if (word == "encode") {
      encode(plans, inputs, outputs, kStream);
      plans = {};
      inputs.clear();
      outputs.clear();
    } else if (word == "read") {
      read(in);
    } else if (word == "finish" || word == "finish_elsewhere") {
      finish(word == "finish_elsewhere");
    } else if (word == "two_ends") {
      two_ends();
    } else if (word == "fail") {
      mx::metal::get_command_encoder(kStream).fails = true;
    } else if (word == "commit") {
      mx::metal::get_command_encoder(kStream).commit();
    } else if (word == "end") {
      mx::metal::get_command_encoder(kStream).end_encoding();
    } else {
      throw std::invalid_argument(word);
    }
  }
}

}  // namespace

}  // namespace mlx_paged

int main() {
  mlx_paged::run(std::cin);
  std::cout << "buffers " << mlx_paged::num_command_buffers() << "\n";
}
