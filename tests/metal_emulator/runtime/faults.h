// Turns the signals of a faulting kernel into findings.
#pragma once

namespace emulator {

// While it lives, a fault or a timeout in a kernel thread ends the launch through
// Launch::escape. Faults anywhere else go to the handlers that were there before.
class FaultHandlers {
 public:
  explicit FaultHandlers(double cpu_seconds);
  ~FaultHandlers();
  FaultHandlers(const FaultHandlers&) = delete;
};

// Reports the fault that led to Launch::escape.
void report_fault();

}  // namespace emulator
