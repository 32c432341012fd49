// The processor a measurement ran on, and how much of it other programs used meanwhile.
#pragma once

#include <chrono>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

namespace oscar::cli {

struct Machine {
  std::string cpu;  // as /proc/cpuinfo names it, else the architecture
  int processors = 0;
  std::size_t last_cache_bytes = 0;  // largest cache of processor 0; 0: unknown
};
Machine this_machine();

double load_average();  // of the last minute

// Clock of this thread's core in Hz, from a chain of dependent one-cycle operations: what it really runs at now.
double core_hertz();

// Counts the processor time that everything except this process and its finished children takes from the construction on:
// /proc/stat (user, nice, system, interrupts, stolen by a hypervisor) minus getrusage(). Resolution 10 ms.
class Bystanders {
 public:
  Bystanders();
  [[nodiscard]] double processors() const;  // busy on average, in processors; 0 where there is no /proc/stat

 private:
  double others_ = 0;  // seconds at construction
  std::chrono::steady_clock::time_point start_;
};

}  // namespace oscar::cli
