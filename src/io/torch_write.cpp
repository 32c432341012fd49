// Writing torch files: one stored zip, protocol-2 pickle without memo, every storage aligned to 64 bytes for mmap.
#include <zip.h>

#include <bit>
#include <deque>
#include <filesystem>
#include <map>

#include "oscar/base/error.h"
#include "oscar/io/dtype.h"
#include "oscar/io/files.h"
#include "oscar/io/torch_file.h"
#include "pickle.h"

namespace oscar {
namespace {

constexpr int kMaxDepth = 64;

class Pickler {
 public:
  std::string run(const TorchValue& value) {
    out_ = "\x80\x02";
    write(value, 0);
    return out_ + '.';
  }
  [[nodiscard]] const std::vector<const TorchTensor*>& storages() const { return storages_; }

 private:
  void write(const TorchValue& value, int depth) {
    if (depth > kMaxDepth) fail("the value is nested deeper than {} levels", kMaxDepth);
    std::visit([&](const auto& data) { put(data, depth); }, value.data);
  }

  void put(std::monostate, int) { out_ += 'N'; }
  void put(bool value, int) { out_ += value ? '\x88' : '\x89'; }
  void put(std::int64_t value, int) {
    if (value >= INT32_MIN && value <= INT32_MAX) {
      out_ += 'J';
      little(static_cast<std::uint64_t>(value), 4);
    } else {
      out_ += "\x8a\x08";
      little(static_cast<std::uint64_t>(value), 8);
    }
  }
  void put(double value, int) {
    out_ += 'G';
    const auto bits = std::bit_cast<std::uint64_t>(value);
    for (int i = 7; i >= 0; --i) out_ += static_cast<char>(bits >> (8 * i) & 0xFFU);
  }
  void put(const std::string& text, int) {
    if (text.size() > UINT32_MAX) fail("a text of {} bytes is too long for a torch file", text.size());
    out_ += 'X';
    little(text.size(), 4);
    out_ += text;
  }
  void put(const std::shared_ptr<TorchList>& list, int depth) {
    out_ += "](";
    for (const TorchValue& item : *list) write(item, depth + 1);
    out_ += 'e';
  }
  void put(const std::shared_ptr<TorchDict>& dict, int depth) {
    out_ += "}(";
    for (const auto& [key, value] : *dict) {
      write(key, depth + 1);
      write(value, depth + 1);
    }
    out_ += 'u';
  }
  void put(const std::shared_ptr<TorchTensor>& tensor, int depth) {
    const std::string storage = torch_storage_name(tensor->dtype);
    if (storage.empty()) fail("torch has no storage for dtype '{}'", tensor->dtype);
    const std::size_t element = dtype_size(tensor->dtype);
    const auto bytes = checked_bytes(tensor->shape, element);
    if (!bytes || *bytes != tensor->bytes.size()) fail("a tensor's bytes do not fit its shape");
    const auto [slot, fresh] = keys_.emplace(tensor.get(), storages_.size());
    if (fresh) storages_.push_back(tensor.get());
    out_ += "ctorch._utils\n_rebuild_tensor_v2\n((";
    put(std::string("storage"), depth);
    out_ += "ctorch\n" + storage + "\n";
    put(std::to_string(slot->second), depth);
    put(std::string("cpu"), depth);
    put(static_cast<std::int64_t>(*bytes / element), depth);
    out_ += "tQ";
    put(std::int64_t{0}, depth);
    std::vector<std::int64_t> strides(tensor->shape.size(), 1);
    for (std::size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<std::int64_t>(tensor->shape[d], 1);
    put_tuple(tensor->shape);
    put_tuple(strides);
    out_ +=
        "\x89"
        "ccollections\nOrderedDict\n)RtR";
  }
  void put_tuple(const std::vector<std::int64_t>& values) {
    out_ += '(';
    for (const std::int64_t value : values) put(value, 0);
    out_ += 't';
  }

  void little(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i) & 0xFFU);
  }

  std::string out_;
  std::map<const TorchTensor*, std::size_t> keys_;  // a tensor reached twice is stored once
  std::vector<const TorchTensor*> storages_;
};

// Appends stored entries and keeps count of where libzip will put their bytes: a local header takes 30 bytes, the name and
// the extra field, and entries follow each other without gaps.
class ZipWriter {
 public:
  explicit ZipWriter(const std::filesystem::path& path) : path_(path.string()) {
    int code = 0;
    zip_ = zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &code);
    if (zip_ != nullptr) return;
    zip_error_t error;
    zip_error_init_with_code(&error, code);
    const std::string cause = zip_error_strerror(&error);
    zip_error_fini(&error);
    fail("cannot write '{}': {}", path_, cause);
  }
  ~ZipWriter() {
    if (zip_ != nullptr) zip_discard(zip_);
  }
  ZipWriter(const ZipWriter&) = delete;
  ZipWriter& operator=(const ZipWriter&) = delete;

  // `bytes` must live until close().
  void add(const std::string& entry, std::span<const std::byte> bytes) {
    zip_source_t* source = zip_source_buffer(zip_, bytes.data(), bytes.size(), 0);
    if (source == nullptr) fail_with("add");
    const zip_int64_t added = zip_file_add(zip_, entry.c_str(), source, ZIP_FL_ENC_UTF_8);
    if (added < 0) {
      zip_source_free(source);
      fail_with("add");
    }
    const auto index = static_cast<zip_uint64_t>(added);
    constexpr std::uint64_t kAlignment = 64, kHeader = 30, kExtraHeader = 4;
    const std::uint64_t start = offset_ + kHeader + entry.size() + kExtraHeader;
    const std::string padding((kAlignment - start % kAlignment) % kAlignment, 'Z');
    constexpr zip_uint16_t kPaddingField = 0x4246;  // "FB", as torch pads
    const bool done = zip_set_file_compression(zip_, index, ZIP_CM_STORE, 0) == 0 &&
                      zip_file_set_dostime(zip_, index, 0, 0x21, 0) == 0 &&  // 1980-01-01: same content, same bytes
                      zip_file_extra_field_set(zip_, index, kPaddingField, ZIP_EXTRA_FIELD_NEW,
                                               reinterpret_cast<const zip_uint8_t*>(padding.data()),
                                               static_cast<zip_uint16_t>(padding.size()), ZIP_FL_LOCAL) == 0;
    if (!done) fail_with("add");
    offset_ = start + padding.size() + bytes.size();
  }

  void close() {  // libzip writes a temporary beside the file and renames it
    if (zip_close(zip_) != 0) fail_with("write");
    zip_ = nullptr;
  }

 private:
  [[noreturn]] void fail_with(const char* action) { fail("cannot {} to '{}': {}", action, path_, zip_strerror(zip_)); }

  std::string path_;
  zip_t* zip_ = nullptr;
  std::uint64_t offset_ = 0;
};

}  // namespace

void write_torch(const TorchValue& value, const std::filesystem::path& path) {
  Pickler pickler;
  const std::string pickle = pickler.run(value);
  ZipWriter zip(path);
  const auto add_text = [&](const char* entry, std::string_view text) { zip.add(entry, std::as_bytes(std::span(text))); };
  add_text("archive/data.pkl", pickle);
  add_text("archive/byteorder", "little");
  std::size_t key = 0;
  for (const TorchTensor* tensor : pickler.storages()) zip.add(fmt::format("archive/data/{}", key++), tensor->bytes);
  add_text("archive/version", "3\n");
  zip.close();
}

}  // namespace oscar
