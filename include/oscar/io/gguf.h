// GGUF v2/v3 headers: metadata and tensor table, checked integers, every count capped by the file's size. Tensor data is read
// only on request. Big-endian files and shards of a split model are recognised and refused by name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "oscar/method/moments.h"

namespace oscar {

struct GgufValue;
using GgufArray = std::vector<GgufValue>;
struct GgufValue {
  std::variant<std::uint64_t, std::int64_t, double, bool, std::string, GgufArray> data;
};

struct GgufTensorInfo {
  std::string name;
  std::vector<std::uint64_t> shape;  // GGUF order: fastest dimension first
  std::uint32_t type = 0;            // ggml type id
  std::uint64_t offset = 0;          // from the start of the file
  std::uint64_t bytes = 0;
};

class Gguf {
 public:
  // Throws Error for anything but a whole, little-endian, single-file GGUF: unknown tensor types, zero or overflowing
  // dimensions, tensors outside the file, duplicate or empty names, counts that the file's size cannot hold.
  explicit Gguf(const std::filesystem::path& path);
  [[nodiscard]] const std::map<std::string, GgufValue>& metadata() const { return metadata_; }
  [[nodiscard]] const std::vector<GgufTensorInfo>& tensors() const { return tensors_; }
  [[nodiscard]] const GgufTensorInfo* find(const std::string& name) const;
  // nullopt when the key is absent, Error when it holds another type.
  [[nodiscard]] std::optional<std::int64_t> integer(const std::string& key) const;
  [[nodiscard]] std::optional<double> number(const std::string& key) const;
  [[nodiscard]] std::optional<std::string> text(const std::string& key) const;
  [[nodiscard]] std::vector<std::byte> read(const GgufTensorInfo& tensor) const;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::map<std::string, GgufValue> metadata_;
  std::vector<GgufTensorInfo> tensors_;
  std::uint64_t file_size_ = 0;
};

// What OSCAR needs to know of a model file.
struct GgufModel {
  std::string architecture, name, fingerprint;
  int n_layer = 0, n_ctx_train = 0, n_embd = 0;
  // Head counts and dims per layer (rope left default: only the host's graph knows it for sure). Explicit key_length and
  // value_length win over n_embd / n_head. Error for head_count 0 and for geometry that does not divide. Layers without
  // attention (a per-layer head_count_kv of 0: hybrid models) are left out. sliding_window follows the metadata where it
  // says so (attention.sliding_window_pattern, and gemma3's fixed pattern of 6); elsewhere only the host's graph knows.
  std::vector<LayerShape> layers;
};
// fingerprint = SHA-256 over: architecture; block_count, embedding_length, head counts, key/value length, rope.* metadata; and
// name and bytes of every 1-D F32 tensor in name order (norms, biases: stored alike in every quantisation of the same
// weights, different in every fine-tune). So F16 and Q4_K files of one model share an artifact.
GgufModel describe_model(const Gguf& file);

}  // namespace oscar
