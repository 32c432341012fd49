// Counters of the process and the file they are written to.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace oscar::llama {

struct Counters {
  std::atomic<std::uint64_t> served{0};     // attention operations computed by us
  std::atomic<std::uint64_t> bypassed{0};   // on a cache we were asked to serve and could not
  std::atomic<std::uint64_t> sliding{0};    // stock, by design
  std::atomic<std::uint64_t> delegated{0};  // stock, modes delegate and capture
  std::atomic<std::uint64_t> set_rows{0}, shifts{0};
  std::atomic<std::uint64_t> graphs{0};        // graph_compute() calls with attention on a cache
  std::atomic<std::uint64_t> checked_rows{0};  // compared with the reference (configuration `check`)
  std::atomic<double> worst_error{0};          // relative, of those
};
Counters& counters();

// JSON text as described in plugin_api.h. `now`: do not wait for locks (the program is ending).
std::string statistics_text(bool now);
void write_statistics(bool now);  // to the configured path, atomically; nothing when there is none
// Writes at exit and on SIGUSR1; called when a path becomes known. Idempotent.
void install_statistics_writer();

}  // namespace oscar::llama
