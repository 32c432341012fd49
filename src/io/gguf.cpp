#include "oscar/io/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <set>

#include "oscar/base/error.h"
#include "oscar/io/files.h"

namespace oscar {
namespace {

constexpr int kMaxDimensions = 4;
constexpr int kMaxArrayDepth = 4;
// Vocabularies have up to a few million entries; a byte array of a whole file would take 40 times its size in memory.
constexpr std::uint64_t kMaxArrayElements = std::uint64_t{1} << 24;

enum class ValueType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

// The least number of bytes one value of a type takes in the file; 0 for an unknown type.
std::uint64_t least_bytes(ValueType type) {
  switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean:
      return 1;
    case ValueType::u16:
    case ValueType::i16:
      return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32:
      return 4;
    case ValueType::string:
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64:
      return 8;
    case ValueType::array:
      return 12;
  }
  return 0;
}

struct BlockType {
  std::uint32_t id;
  std::uint32_t values, bytes;  // per block
};
// ggml's tensor types as of ggml 0.26; removed and unassigned ids are absent.
constexpr std::array<BlockType, 35> kBlockTypes = {
    {{0, 1, 4},      {1, 1, 2},     {2, 32, 18},    {3, 32, 20},    {6, 32, 22},    {7, 32, 24},    {8, 32, 34},
     {9, 32, 36},    {10, 256, 84}, {11, 256, 110}, {12, 256, 144}, {13, 256, 176}, {14, 256, 210}, {15, 256, 292},
     {16, 256, 66},  {17, 256, 74}, {18, 256, 98},  {19, 256, 50},  {20, 32, 18},   {21, 256, 110}, {22, 256, 82},
     {23, 256, 136}, {24, 1, 1},    {25, 1, 2},     {26, 1, 4},     {27, 1, 8},     {28, 1, 8},     {29, 256, 56},
     {30, 1, 2},     {34, 256, 54}, {35, 256, 66},  {39, 32, 17},   {40, 64, 36},   {41, 128, 18},  {42, 64, 18}}};

// Reads a file front to back through a buffer; knows how much is left, which caps every count.
class Cursor {
 public:
  explicit Cursor(const FileReader& file) : file_(file) {}

  [[nodiscard]] std::uint64_t position() const { return position_; }
  [[nodiscard]] std::uint64_t left() const { return file_.size() - position_; }

  void read(std::span<std::byte> out) {
    if (out.size() > left()) fail("'{}' is incomplete: it ends inside its header; fetch it again", file_.path().string());
    std::size_t done = 0;
    while (done < out.size()) {
      if (position_ < begin_ || position_ >= begin_ + buffer_.size()) refill();
      const auto offset = static_cast<std::size_t>(position_ - begin_);
      const std::size_t n = std::min(out.size() - done, buffer_.size() - offset);
      std::memcpy(out.data() + done, buffer_.data() + offset, n);
      done += n;
      position_ += n;
    }
  }

  template <class T>
  T value() {
    T result;
    read(std::as_writable_bytes(std::span(&result, 1)));
    return result;
  }

  std::string text(const char* what) {
    const auto length = value<std::uint64_t>();
    if (length > left()) {
      fail("'{}' is incomplete or corrupt: {} claims {} bytes but {} are left", file_.path().string(), what, length, left());
    }
    std::string result(length, '\0');
    read(std::as_writable_bytes(std::span(result)));
    return result;
  }

 private:
  void refill() {
    constexpr std::uint64_t kBuffer = std::uint64_t{1} << 18;
    begin_ = position_;
    buffer_.resize(static_cast<std::size_t>(std::min(kBuffer, file_.size() - begin_)));
    file_.read(begin_, buffer_);
  }

  const FileReader& file_;
  std::vector<std::byte> buffer_;
  std::uint64_t begin_ = 0, position_ = 0;
};

class HeaderReader {
 public:
  explicit HeaderReader(const FileReader& file) : file_(file), name_(file.path().string()), cursor_(file) {}

  void preamble() {
    if (file_.size() < 24) fail("'{}' is too short ({} bytes) for a GGUF file", name_, file_.size());
    std::array<char, 4> magic{};
    cursor_.read(std::as_writable_bytes(std::span(magic)));
    const std::string_view text(magic.data(), magic.size());
    const auto version = cursor_.value<std::uint32_t>();
    if (text == "FUGG" || (text == "GGUF" && version != 0 && (version & 0xFFFFU) == 0)) {
      fail("'{}' is a big-endian GGUF file; convert it to little-endian first", name_);
    }
    if (text != "GGUF") fail("'{}' is not a GGUF file", name_);
    if (version == 1) fail("'{}' is GGUF version 1, which is no longer supported; convert the model again", name_);
    if (version != 2 && version != 3) fail("'{}' is GGUF version {}; versions 2 and 3 are supported", name_, version);
    n_tensors_ = cursor_.value<std::uint64_t>();
    n_pairs_ = cursor_.value<std::uint64_t>();
    constexpr std::uint64_t kLeastTensor = 8 + 1 + 4 + 8 + 4 + 8, kLeastPair = 8 + 1 + 4 + 1;
    if (n_tensors_ > cursor_.left() / kLeastTensor || n_pairs_ > cursor_.left() / kLeastPair) {
      fail("'{}' is incomplete or corrupt: {} tensors and {} metadata entries do not fit in {} bytes", name_, n_tensors_,
           n_pairs_, file_.size());
    }
  }

  std::map<std::string, GgufValue> metadata() {
    std::map<std::string, GgufValue> result;
    for (std::uint64_t i = 0; i < n_pairs_; ++i) {
      std::string key = cursor_.text("a metadata key");
      if (key.empty()) fail("'{}' is corrupt: metadata entry {} has an empty key", name_, i);
      GgufValue value = read_value(read_type(key), key, 0);
      if (!result.emplace(key, std::move(value)).second) fail("'{}' is corrupt: metadata key '{}' appears twice", name_, key);
    }
    return result;
  }

  // Offsets are still relative to the data section.
  std::vector<GgufTensorInfo> tensors() {
    std::vector<GgufTensorInfo> result;
    std::set<std::string> names;
    for (std::uint64_t i = 0; i < n_tensors_; ++i) {
      GgufTensorInfo tensor;
      tensor.name = cursor_.text("a tensor name");
      if (tensor.name.empty()) fail("'{}' is corrupt: tensor {} has an empty name", name_, i);
      if (!names.insert(tensor.name).second) fail("'{}' is corrupt: tensor '{}' appears twice", name_, tensor.name);
      const auto n_dims = cursor_.value<std::uint32_t>();
      if (n_dims == 0 || n_dims > kMaxDimensions) {
        fail("'{}' is corrupt: tensor '{}' has {} dimensions, not 1 to {}", name_, tensor.name, n_dims, kMaxDimensions);
      }
      for (std::uint32_t d = 0; d < n_dims; ++d) tensor.shape.push_back(cursor_.value<std::uint64_t>());
      tensor.type = cursor_.value<std::uint32_t>();
      tensor.offset = cursor_.value<std::uint64_t>();
      tensor.bytes = tensor_bytes(tensor);
      result.push_back(std::move(tensor));
    }
    return result;
  }

  // Turns relative offsets into file offsets and checks that every tensor lies inside the file.
  void place(std::vector<GgufTensorInfo>& tensors, std::uint64_t alignment) const {
    if (!std::has_single_bit(alignment) || alignment > (std::uint64_t{1} << 30)) {
      fail("'{}' is corrupt: general.alignment {} is not a power of two", name_, alignment);
    }
    const std::uint64_t data = (cursor_.position() + alignment - 1) / alignment * alignment;
    for (GgufTensorInfo& tensor : tensors) {
      if (tensor.offset % alignment != 0) fail("'{}' is corrupt: tensor '{}' is not aligned", name_, tensor.name);
      if (data > file_.size() || tensor.offset > file_.size() - data || tensor.bytes > file_.size() - data - tensor.offset) {
        fail(
            "'{}' is incomplete: tensor '{}' lies out of bounds ({} bytes at data offset {}, file of {} bytes); fetch it again",
            name_, tensor.name, tensor.bytes, tensor.offset, file_.size());
      }
      tensor.offset += data;
    }
  }

 private:
  ValueType read_type(const std::string& key) {
    const auto type = cursor_.value<std::uint32_t>();
    if (least_bytes(static_cast<ValueType>(type)) == 0) {
      fail("'{}' is corrupt: metadata '{}' has the unknown type {}", name_, key, type);
    }
    return static_cast<ValueType>(type);
  }

  GgufValue read_value(ValueType type, const std::string& key, int depth) {
    switch (type) {
      case ValueType::u8:
        return {std::uint64_t{cursor_.value<std::uint8_t>()}};
      case ValueType::u16:
        return {std::uint64_t{cursor_.value<std::uint16_t>()}};
      case ValueType::u32:
        return {std::uint64_t{cursor_.value<std::uint32_t>()}};
      case ValueType::u64:
        return {cursor_.value<std::uint64_t>()};
      case ValueType::i8:
        return {std::int64_t{cursor_.value<std::int8_t>()}};
      case ValueType::i16:
        return {std::int64_t{cursor_.value<std::int16_t>()}};
      case ValueType::i32:
        return {std::int64_t{cursor_.value<std::int32_t>()}};
      case ValueType::i64:
        return {cursor_.value<std::int64_t>()};
      case ValueType::f32:
        return {double{cursor_.value<float>()}};
      case ValueType::f64:
        return {cursor_.value<double>()};
      case ValueType::boolean: {
        const auto byte = cursor_.value<std::uint8_t>();
        if (byte > 1) fail("'{}' is corrupt: metadata '{}' is a boolean of value {}", name_, key, byte);
        return {byte == 1};
      }
      case ValueType::string:
        return {cursor_.text("a metadata text")};
      case ValueType::array:
        return read_array(key, depth + 1);
    }
    fail("'{}' is corrupt: metadata '{}' has an unknown type", name_, key);
  }

  GgufValue read_array(const std::string& key, int depth) {
    if (depth > kMaxArrayDepth) fail("'{}' is corrupt: metadata '{}' is nested too deeply", name_, key);
    const ValueType type = read_type(key);
    const auto count = cursor_.value<std::uint64_t>();
    if (count > cursor_.left() / least_bytes(type)) {
      fail("'{}' is incomplete or corrupt: metadata '{}' claims {} elements", name_, key, count);
    }
    n_elements_ += count;
    if (n_elements_ > kMaxArrayElements) fail("'{}' has more than {} metadata array elements", name_, kMaxArrayElements);
    GgufArray array;
    array.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) array.push_back(read_value(type, key, depth));
    return {std::move(array)};
  }

  [[nodiscard]] std::uint64_t tensor_bytes(const GgufTensorInfo& tensor) const {
    const auto found =
        std::find_if(kBlockTypes.begin(), kBlockTypes.end(), [&](const BlockType& type) { return type.id == tensor.type; });
    if (found == kBlockTypes.end() || found->bytes == 0) {
      fail("'{}': tensor '{}' has the unknown type {}; it is corrupt or newer than this OSCAR", name_, tensor.name,
           tensor.type);
    }
    constexpr auto kMaxValues = static_cast<std::uint64_t>(INT64_MAX) / 8;  // no type takes more than 8 bytes per value
    std::uint64_t values = 1;
    for (const std::uint64_t dimension : tensor.shape) {
      if (dimension == 0) fail("'{}' is corrupt: tensor '{}' has a dimension of 0", name_, tensor.name);
      if (dimension > kMaxValues / values) fail("'{}' is corrupt: the size of tensor '{}' overflows", name_, tensor.name);
      values *= dimension;
    }
    if (tensor.shape[0] % found->values != 0) {
      fail("'{}' is corrupt: rows of tensor '{}' ({} values) are not whole blocks of {}", name_, tensor.name, tensor.shape[0],
           found->values);
    }
    return values / found->values * found->bytes;
  }

  const FileReader& file_;
  std::string name_;
  Cursor cursor_;
  std::uint64_t n_tensors_ = 0, n_pairs_ = 0, n_elements_ = 0;
};

std::optional<std::int64_t> as_integer(const GgufValue& value) {
  if (const auto* u = std::get_if<std::uint64_t>(&value.data); u != nullptr && *u <= static_cast<std::uint64_t>(INT64_MAX)) {
    return static_cast<std::int64_t>(*u);
  }
  if (const auto* i = std::get_if<std::int64_t>(&value.data)) return *i;
  return std::nullopt;
}

}  // namespace

Gguf::Gguf(const std::filesystem::path& path) : path_(path) {
  const FileReader file(path);
  file_size_ = file.size();
  HeaderReader reader(file);
  reader.preamble();
  metadata_ = reader.metadata();
  if (const auto shards = integer("split.count"); shards && *shards > 1) {
    fail("'{}' is shard {} of {} of a split model; join them with llama-gguf-split --merge first", path.string(),
         integer("split.no").value_or(0) + 1, *shards);
  }
  tensors_ = reader.tensors();
  const std::int64_t alignment = integer("general.alignment").value_or(32);
  if (alignment <= 0) fail("'{}' is corrupt: general.alignment is {}", path.string(), alignment);
  reader.place(tensors_, static_cast<std::uint64_t>(alignment));
}

const GgufTensorInfo* Gguf::find(const std::string& name) const {
  const auto found = std::find_if(tensors_.begin(), tensors_.end(), [&](const GgufTensorInfo& t) { return t.name == name; });
  return found == tensors_.end() ? nullptr : &*found;
}

std::optional<std::int64_t> Gguf::integer(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) return std::nullopt;
  const auto value = as_integer(found->second);
  if (!value) fail("metadata '{}' of '{}' is not an integer", key, path_.string());
  return value;
}

std::optional<double> Gguf::number(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) return std::nullopt;
  if (const auto* number = std::get_if<double>(&found->second.data)) return *number;
  const auto value = as_integer(found->second);
  if (!value) fail("metadata '{}' of '{}' is not a number", key, path_.string());
  return static_cast<double>(*value);
}

std::optional<std::string> Gguf::text(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) return std::nullopt;
  const auto* text = std::get_if<std::string>(&found->second.data);
  if (text == nullptr) fail("metadata '{}' of '{}' is not a string", key, path_.string());
  return *text;
}

std::vector<std::byte> Gguf::read(const GgufTensorInfo& tensor) const {
  const FileReader file(path_);
  if (file.size() != file_size_) fail("'{}' changed while it was in use", path_.string());
  std::vector<std::byte> bytes(tensor.bytes);
  file.read(tensor.offset, bytes);
  return bytes;
}

}  // namespace oscar
