#include "statistics.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <thread>

#include "capture.h"
#include "config.h"
#include "host.h"
#include "kv_buffer.h"
#include "oscar/attention/attention.h"
#include "report.h"

namespace oscar::llama {
namespace {

int g_wake[2] = {-1, -1};  // the signal handler writes, the writer thread reads

extern "C" void on_signal(int) {
  const char byte = 0;
  const ssize_t ignored = write(g_wake[1], &byte, 1);  // a full pipe means that a report is due anyway
  static_cast<void>(ignored);
}

void at_exit() { write_statistics(true); }

void writer() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  char byte = 0;
  while (read(g_wake[0], &byte, 1) == 1) write_statistics(false);
}

void install() {
  std::atexit(at_exit);
  struct sigaction current = {};
  if (sigaction(SIGUSR1, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) return;  // the program's own
  if (pipe(g_wake) != 0) return;
  std::thread(writer).detach();
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
}

}  // namespace

Counters& counters() {
  static Counters c;
  return c;
}

std::string statistics_text(bool now) {
  const Counters& c = counters();
  const nlohmann::json caches = cache_statistics(now);
  nlohmann::json artifact = nullptr;
  for (const auto& cache : caches) {
    if (cache.contains("artifact")) artifact = cache["artifact"];
  }
  const std::string refusal = last_refusal();
  nlohmann::json j = {{"ggml_version", host().version},
                      {"built_for_ggml_version", OSCAR_GGML_VERSION},
                      {"mode", to_string(config().mode)},
                      {"artifact_digest", artifact},
                      {"cpu_path", cpu_path()},
                      {"attention_served", c.served.load()},
                      {"attention_bypassed", c.bypassed.load()},
                      {"attention_sliding_window", c.sliding.load()},
                      {"attention_delegated", c.delegated.load()},
                      {"set_rows", c.set_rows.load()},
                      {"graphs", c.graphs.load()},
                      {"shifts", c.shifts.load()},
                      {"captured_blocks", captured_blocks()},
                      {"caches", caches},
                      {"refused", refusal.empty() ? nlohmann::json(nullptr) : nlohmann::json(refusal)}};
  if (config().check) {
    j["checked_rows"] = c.checked_rows.load();
    j["worst_relative_error"] = c.worst_error.load();
  }
  return j.dump(2) + "\n";
}

void write_statistics(bool now) {
  static std::mutex mutex;
  const std::string path = config().stats;
  if (path.empty()) return;
  try {
    const std::string text = statistics_text(now);
    const std::lock_guard lock(mutex);
    const std::string temporary = path + "." + std::to_string(getpid()) + ".tmp";
    {
      std::ofstream file(temporary, std::ios::binary);
      file << text;
      if (!file.flush()) {
        say(0, "cannot write statistics to " + path);
        return;
      }
    }
    if (std::rename(temporary.c_str(), path.c_str()) != 0) say(0, "cannot write statistics to " + path);
  } catch (const std::exception& e) {
    say(0, std::string("cannot write statistics: ") + e.what());
  }
}

void install_statistics_writer() {
  static std::once_flag once;
  if (!config().stats.empty()) std::call_once(once, install);
}

}  // namespace oscar::llama
