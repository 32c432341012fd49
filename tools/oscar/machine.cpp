#include "machine.h"

#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

namespace oscar::cli {
namespace {

double seconds(const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); }

double own_seconds() {
  double sum = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    if (getrusage(who, &usage) == 0) sum += seconds(usage.ru_utime) + seconds(usage.ru_stime);
  }
  return sum;
}

// Processor time of the whole machine since it started; first line of /proc/stat, in ticks:
// cpu user nice system idle iowait irq softirq steal guest guest_nice (guests are already in user and nice)
double busy_seconds() {
  std::ifstream file("/proc/stat");
  std::string word;
  double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
  file >> word >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
  if (!file || word != "cpu") return 0;
  return (user + nice + system + irq + softirq + steal) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double others_seconds() {
  const double busy = busy_seconds();
  return busy > 0 ? busy - own_seconds() : 0;
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon != std::string::npos && colon + 2 < line.size()) return line.substr(colon + 2);
  }
  utsname name{};
  return uname(&name) == 0 ? name.machine : "unknown processor";
}

std::size_t last_cache_bytes() {
  std::size_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    std::size_t size = 0;
    char unit = 0;
    if (!(file >> size)) continue;
    file >> unit;
    largest = std::max(largest, size * (unit == 'K' ? 1024U : unit == 'M' ? 1024U * 1024U : 1U));
  }
  return largest;
}

}  // namespace

Machine this_machine() {
  return {cpu_name(), static_cast<int>(std::max(1U, std::thread::hardware_concurrency())), last_cache_bytes()};
}

double load_average() {
  double load = 0;
  return getloadavg(&load, 1) == 1 ? load : 0;
}

double core_hertz() {
  using Clock = std::chrono::steady_clock;
  double best = 0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    constexpr std::uint64_t kSteps = 1'000'000;
    auto x = static_cast<std::uint64_t>(repeat);
    const auto start = Clock::now();
    for (std::uint64_t i = 0; i < kSteps; ++i) {
      x += i ^ x;  // xor, then add: two dependent cycles
      asm volatile("" : "+r"(x));
    }
    best = std::max(best, 2.0 * kSteps / std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

Bystanders::Bystanders() : others_(others_seconds()), start_(std::chrono::steady_clock::now()) {}

double Bystanders::processors() const {
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  return elapsed > 0 ? std::max(0.0, (others_seconds() - others_) / elapsed) : 0;
}

}  // namespace oscar::cli
