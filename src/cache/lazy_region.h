// Zero-filled memory of a fixed address range whose pages exist only once written.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar {

class LazyRegion {
 public:
  LazyRegion() = default;
  explicit LazyRegion(std::size_t bytes);  // 0: empty. Throws Error when the address range cannot be reserved.
  ~LazyRegion();
  LazyRegion(LazyRegion&& other) noexcept;
  LazyRegion& operator=(LazyRegion&& other) noexcept;
  LazyRegion(const LazyRegion&) = delete;
  LazyRegion& operator=(const LazyRegion&) = delete;

  [[nodiscard]] std::uint8_t* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  // Gives the whole pages inside bytes [begin, end) back to the system; they read as zeros afterwards.
  void release(std::size_t begin, std::size_t end);
  void release_all() { release(0, size_); }
  [[nodiscard]] std::size_t resident_bytes() const;  // measured with mincore

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace oscar
