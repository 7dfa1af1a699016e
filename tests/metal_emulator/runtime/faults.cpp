#include "faults.h"

#include <sys/time.h>
#include <ucontext.h>

#include <csignal>
#include <string>

#include "launch.h"

namespace emulator {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGVTALRM};
constexpr int kSignalCount = sizeof(kSignals) / sizeof(kSignals[0]);
constexpr size_t kSignalStackBytes = 64 * 1024;

struct Fault {
  int signal;
  const char* address;
  bool has_address;  // general protection faults have none
  const void* site;
  bool is_store;
};

Fault fault;
struct sigaction previous[kSignalCount];
stack_t previous_stack;
alignas(16) char signal_stack[kSignalStackBytes];

void restore_handlers() {
  for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &previous[i], nullptr);
}

// Where the kernel called the library function (memcpy, say) whose stack begins at `stack`.
const char* caller(char** stack) {
  constexpr int kWords = 64;
  for (int i = 0; i < kWords; i++) {
    if (current_launch->image.contains(stack[i])) return stack[i];
  }
  return nullptr;
}

void handle(int signal, siginfo_t* info, void* context) {
  if (!current_launch || !current_launch->running) {
    if (signal == SIGVTALRM && current_launch) current_launch->is_overdue = 1;
    if (signal != SIGVTALRM) restore_handlers();  // a fault of the emulator's own happens again
    return;
  }
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const char* instruction = reinterpret_cast<const char*>(registers[REG_RIP]);
  const bool is_in_kernel = current_launch->image.contains(instruction);
  if (signal == SIGVTALRM && !is_in_kernel) {  // in the middle of the emulator's own work
    current_launch->is_overdue = 1;
    return;
  }
  constexpr long kPageFaultByWrite = 2;
  fault.signal = signal;
  fault.address = static_cast<const char*>(info->si_addr);
  fault.has_address = info->si_code != SI_KERNEL;
  // One byte on: report sites are return addresses, which lie behind the instruction.
  fault.site =
      is_in_kernel ? instruction + 1 : caller(reinterpret_cast<char**>(registers[REG_RSP]));
  fault.is_store = registers[REG_ERR] & kPageFaultByWrite;
  siglongjmp(current_launch->escape, 1);
}

void set_timer(double cpu_seconds) {
  itimerval timer{};
  timer.it_value.tv_sec = static_cast<time_t>(cpu_seconds);
  timer.it_value.tv_usec = static_cast<suseconds_t>((cpu_seconds - timer.it_value.tv_sec) * 1e6);
  timer.it_interval.tv_usec = 10'000;
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

void report_bad_address(Launch& launch) {
  if (launch.monitor && launch.monitor->has_reported(fault.address)) return;
  const std::string who = (fault.is_store ? "store by " : "load by ") + launch.running->name();
  if (launch.stacks->is_guard(fault.address)) {
    launch.findings.report(kind::stack_overflow, fault.site, [&] { return who; });
  } else if (launch.buffers.is_unbound(fault.address)) {
    launch.findings.report(kind::unbound, fault.site, [&] {
      return launch.buffers.unbound_name(fault.address) + " is not bound; " + who;
    });
  } else if (auto index = launch.buffers.find(fault.address)) {
    const Buffer& buffer = launch.buffers[*index];
    const bool is_inside = buffer.contains(fault.address);
    launch.findings.report(is_inside ? kind::read_only : kind::out_of_bounds, fault.site, [&] {
      return "byte " + std::to_string(fault.address - buffer.begin) + " of buffer " +
             std::to_string(*index) + ", which has " + std::to_string(buffer.size) + " bytes; " +
             who;
    });
  } else {
    launch.findings.report(kind::wild, fault.site, [&] {
      return (fault.has_address ? "" : "no such address, or a misaligned vector; ") + who;
    });
  }
}

}  // namespace

FaultHandlers::FaultHandlers(double cpu_seconds) {
  stack_t stack{};
  stack.ss_sp = signal_stack;
  stack.ss_size = kSignalStackBytes;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &action, &previous[i]);
  set_timer(cpu_seconds);
}

FaultHandlers::~FaultHandlers() {
  set_timer(0);  // off
  restore_handlers();
  sigaltstack(&previous_stack, nullptr);
}

void report_fault() {
  Launch& launch = *current_launch;
  switch (fault.signal) {
    case SIGFPE:
      return launch.findings.report(kind::undefined, fault.site, [&] {
        return "integer division by zero or overflow; " + launch.running->name();
      });
    case SIGVTALRM:
      return launch.findings.report(kind::endless, fault.site,
                                    [&] { return "gave up in " + launch.running->name(); });
    default:
      return report_bad_address(launch);
  }
}

}  // namespace emulator
