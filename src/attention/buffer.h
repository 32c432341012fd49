// Scratch memory for vector loads: aligned, zero when new, only ever grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace oscar::attention {

template <class T>
class Buffer {
 public:
  // Afterwards at least n values may be used; all of them are 0 if the buffer had to grow, else they are as they were.
  void reserve(std::size_t n) {
    if (n <= size_) return;
    const std::size_t bytes = (n * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    data_.reset(static_cast<T*>(std::aligned_alloc(kAlignment, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_.get(), 0, bytes);
    size_ = n;
  }
  T* data() { return data_.get(); }
  [[nodiscard]] const T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  static constexpr std::size_t kAlignment = 64;
  std::unique_ptr<T, Free> data_;
  std::size_t size_ = 0;
};

using FloatBuffer = Buffer<float>;
using WordBuffer = Buffer<std::uint32_t>;

}  // namespace oscar::attention
