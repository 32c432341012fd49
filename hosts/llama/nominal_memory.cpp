#include "nominal_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace oscar::llama {
namespace {

struct Pages {  // the whole pages inside a range
  std::byte* begin;
  std::byte* end;
};

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

Pages whole_pages(void* base, std::size_t size) {
  auto* first = static_cast<std::byte*>(base);
  const std::size_t skip = (page_size() - reinterpret_cast<std::uintptr_t>(first) % page_size()) % page_size();
  if (skip >= size) return {first, first};
  const std::size_t length = (size - skip) / page_size() * page_size();
  return {first + skip, first + skip + length};
}

}  // namespace

std::size_t resident_bytes(const void* base, std::size_t size) {
  const Pages pages = whole_pages(const_cast<void*>(base), size);
  std::size_t resident = 0;
  std::vector<unsigned char> state(1024);
  const std::size_t step = state.size() * page_size();
  for (std::byte* p = pages.begin; p < pages.end; p += step) {
    const auto length = std::min(step, static_cast<std::size_t>(pages.end - p));
    if (mincore(p, length, state.data()) != 0) continue;
    for (std::size_t i = 0; i < length / page_size(); ++i) resident += (state[i] & 1U) != 0 ? page_size() : 0;
  }
  return resident;
}

void release_pages(void* base, std::size_t size) {
  const Pages pages = whole_pages(base, size);
  if (pages.end > pages.begin) madvise(pages.begin, static_cast<std::size_t>(pages.end - pages.begin), MADV_DONTNEED);
}

void zero_fill(void* base, std::size_t size) {
  const Pages pages = whole_pages(base, size);
  auto* first = static_cast<std::byte*>(base);
  if (pages.end == pages.begin) {
    std::memset(first, 0, size);
    return;
  }
  std::memset(first, 0, static_cast<std::size_t>(pages.begin - first));
  release_pages(base, size);
  std::memset(pages.end, 0, static_cast<std::size_t>(first + size - pages.end));
}

}  // namespace oscar::llama
