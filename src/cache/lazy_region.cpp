#include "cache/lazy_region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "oscar/base/error.h"

namespace oscar {
namespace {

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

LazyRegion::LazyRegion(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("cannot reserve {} bytes of address space for the cache: {}", bytes, std::strerror(errno));
  // A huge page would make 2 MiB resident for the first row of every region. Advice only: kernels without them refuse it.
  (void)madvise(p, bytes, MADV_NOHUGEPAGE);
  data_ = static_cast<std::uint8_t*>(p);
}

LazyRegion::~LazyRegion() {
  if (data_ != nullptr) munmap(data_, size_);
}

LazyRegion::LazyRegion(LazyRegion&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

LazyRegion& LazyRegion::operator=(LazyRegion&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void LazyRegion::release(std::size_t begin, std::size_t end) {
  const std::size_t first = (begin + page_size() - 1) / page_size() * page_size();
  const std::size_t last = end >= size_ ? size_ : end / page_size() * page_size();
  if (first >= last) return;
  if (madvise(data_ + first, last - first, MADV_DONTNEED) != 0) {
    fail("cannot give {} bytes of the cache back to the system: {}", last - first, std::strerror(errno));
  }
}

std::size_t LazyRegion::resident_bytes() const {
  std::array<unsigned char, 4096> flags;
  std::size_t pages = 0;
  const std::size_t step = flags.size() * page_size();
  for (std::size_t begin = 0; begin < size_; begin += step) {
    const std::size_t bytes = std::min(step, size_ - begin);
    if (mincore(data_ + begin, bytes, flags.data()) != 0) fail("mincore failed on the cache: {}", std::strerror(errno));
    const std::size_t n = (bytes + page_size() - 1) / page_size();
    pages += static_cast<std::size_t>(std::count_if(flags.begin(), flags.begin() + static_cast<std::ptrdiff_t>(n),
                                                    [](unsigned char f) { return (f & 1U) != 0; }));
  }
  return pages * page_size();
}

}  // namespace oscar
