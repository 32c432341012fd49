// Builds GGUF bytes, sound or deliberately not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/scratch.h"

namespace oscar::test {

class GgufBuilder {
 public:
  GgufBuilder& u32(const std::string& key, std::uint32_t value) { return pair(key, 4, raw(value)); }
  GgufBuilder& u64(const std::string& key, std::uint64_t value) { return pair(key, 10, raw(value)); }
  GgufBuilder& f32(const std::string& key, float value) { return pair(key, 6, raw(value)); }
  GgufBuilder& text(const std::string& key, const std::string& value) { return pair(key, 8, string(value)); }
  GgufBuilder& u32s(const std::string& key, const std::vector<std::uint32_t>& values) {
    std::string bytes = raw(std::uint32_t{4}) + raw(std::uint64_t{values.size()});
    for (const std::uint32_t value : values) bytes += raw(value);
    return pair(key, 9, bytes);
  }
  GgufBuilder& flags(const std::string& key, const std::vector<bool>& values) {
    std::string bytes = raw(std::uint32_t{7}) + raw(std::uint64_t{values.size()});
    for (const bool value : values) bytes += value ? '\1' : '\0';
    return pair(key, 9, bytes);
  }
  // Any value type with any bytes.
  GgufBuilder& pair(const std::string& key, std::uint32_t type, const std::string& bytes) {
    pairs_ += string(key) + raw(type) + bytes;
    ++n_pairs_;
    return *this;
  }

  GgufBuilder& tensor(const std::string& name, const std::vector<std::uint64_t>& shape, std::uint32_t type,
                      const std::string& bytes) {
    describe(name, static_cast<std::uint32_t>(shape.size()), shape, type, data_.size());
    data_ += bytes;
    data_.resize((data_.size() + 31) / 32 * 32);
    return *this;
  }
  GgufBuilder& floats(const std::string& name, const std::vector<float>& values) {
    return tensor(name, {values.size()}, 0, std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4));
  }
  GgufBuilder& describe(const std::string& name, std::uint32_t n_dims, const std::vector<std::uint64_t>& shape,
                        std::uint32_t type, std::uint64_t offset) {
    tensors_ += string(name) + raw(n_dims);
    for (const std::uint64_t dimension : shape) tensors_ += raw(dimension);
    tensors_ += raw(type) + raw(offset);
    ++n_tensors_;
    return *this;
  }

  [[nodiscard]] std::string header(std::uint32_t version = 3) const {
    return "GGUF" + raw(version) + raw(n_tensors_) + raw(n_pairs_) + pairs_ + tensors_;
  }
  [[nodiscard]] std::string bytes(std::uint32_t version = 3) const {
    std::string result = header(version);
    result.resize((result.size() + 31) / 32 * 32);
    return result + data_;
  }

  static std::string string(const std::string& value) { return raw(std::uint64_t{value.size()}) + value; }
  template <class T>
  static std::string raw(T value) {
    std::string bytes;
    append_number(bytes, value);
    return bytes;
  }

 private:
  std::string pairs_, tensors_, data_;
  std::uint64_t n_pairs_ = 0, n_tensors_ = 0;
};

// A small llama: 2 layers, 4 query and 2 KV heads of 16.
inline GgufBuilder small_llama() {
  GgufBuilder builder;
  builder.text("general.architecture", "llama").text("general.name", "small").u32("llama.block_count", 2);
  builder.u32("llama.embedding_length", 64).u32("llama.context_length", 512).u32("llama.attention.head_count", 4);
  builder.u32("llama.attention.head_count_kv", 2).f32("llama.rope.freq_base", 10000);
  builder.floats("blk.0.attn_norm.weight", {1, 2, 3}).floats("blk.1.attn_norm.weight", {4, 5});
  builder.tensor("blk.0.attn_q.weight", {32, 2}, 8, std::string(68, '\x11'));  // q8_0
  return builder;
}

}  // namespace oscar::test
