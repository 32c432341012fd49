#include "report.h"

#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <set>

#include "config.h"
#include "statistics.h"

namespace oscar::llama {
namespace {

struct Refusals {
  std::mutex mutex;
  std::set<std::string, std::less<>> printed;
  std::string last;
};
Refusals& refusals() {
  static auto* r = new Refusals;
  return *r;
}

}  // namespace

void say(int level, std::string_view line) {
  if (level > config().log) return;
  std::fprintf(stderr, "oscar: %.*s\n", static_cast<int>(line.size()), line.data());
}

void refuse(std::string_view sentence) {
  Refusals& r = refusals();
  {
    const std::lock_guard lock(r.mutex);
    r.last = sentence;
    if (!r.printed.emplace(sentence).second && !config().strict) return;
  }
  if (config().strict) die(sentence);
  say(0, "warning: running without OSCAR: " + std::string(sentence));
}

void die(std::string_view sentence) {
  {
    const std::lock_guard lock(refusals().mutex);
    refusals().last = sentence;
  }
  std::fprintf(stderr, "oscar: error: %.*s\n", static_cast<int>(sentence.size()), sentence.data());
  write_statistics(true);
  std::fflush(nullptr);
  _exit(kStrictExit);  // no destructors: other threads of the host are in the middle of a graph
}

std::string last_refusal() {
  const std::lock_guard lock(refusals().mutex);
  return refusals().last;
}

}  // namespace oscar::llama
