#include "oscar/io/torch_file.h"

#include <zip.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/io/dtype.h"
#include "oscar/io/files.h"
#include "pickle.h"

namespace oscar {
namespace {

// Views may overlap or repeat elements (stride 0), so tensors can be larger than the file; this bounds by how much.
constexpr std::uint64_t kMaxExpansion = 64;
constexpr std::uint64_t kMaxPickle = std::uint64_t{1} << 24;

// A zip whose entries are stored, read through libzip (zip64 and data descriptors included).
class StoredZip {
 public:
  explicit StoredZip(const std::filesystem::path& path) : name_(path.string()), file_size_(check_magic(path)) {
    int code = 0;
    zip_.reset(zip_open(path.c_str(), ZIP_RDONLY, &code));
    if (zip_) return;
    zip_error_t error;
    zip_error_init_with_code(&error, code);
    const std::string cause = zip_error_strerror(&error);
    zip_error_fini(&error);
    fail("'{}' is not a whole zip file ({}); it is incomplete or corrupt, fetch it again", name_, cause);
  }

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::uint64_t file_size() const { return file_size_; }

  // The folder every entry of a torch file lives in: what stands before "/data.pkl".
  [[nodiscard]] std::string root() const {
    constexpr std::string_view kPickle = "/data.pkl";
    std::string root;
    const zip_int64_t n = zip_get_num_entries(zip_.get(), 0);
    for (zip_int64_t i = 0; i < n; ++i) {
      const char* raw = zip_get_name(zip_.get(), static_cast<zip_uint64_t>(i), ZIP_FL_ENC_RAW);
      const std::string_view entry = raw == nullptr ? "" : raw;
      if (!entry.ends_with(kPickle)) continue;
      if (!root.empty()) fail("'{}' is not a torch file: it holds two data.pkl", name_);
      root = entry.substr(0, entry.size() - kPickle.size());
    }
    if (root.empty()) fail("'{}' is a zip file but not a torch file: it has no data.pkl", name_);
    return root;
  }

  // nullopt when there is no such entry. Never more bytes than the file has.
  [[nodiscard]] std::optional<std::vector<std::byte>> read(const std::string& entry, std::uint64_t maximum) const {
    const zip_int64_t index = zip_name_locate(zip_.get(), entry.c_str(), ZIP_FL_ENC_RAW);
    if (index < 0) return std::nullopt;
    zip_stat_t stat;
    zip_stat_init(&stat);
    constexpr zip_uint64_t kNeeded = ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
    if (zip_stat_index(zip_.get(), static_cast<zip_uint64_t>(index), 0, &stat) != 0 || (stat.valid & kNeeded) != kNeeded) {
      fail("entry '{}' of '{}' cannot be read: {}", entry, name_, zip_strerror(zip_.get()));
    }
    if (stat.comp_method != ZIP_CM_STORE || stat.encryption_method != ZIP_EM_NONE) {
      fail("entry '{}' of '{}' is compressed or encrypted; torch.save stores its entries, save the file again", entry, name_);
    }
    if (stat.size != stat.comp_size || stat.size > file_size_ || stat.size > maximum) {
      fail("entry '{}' of '{}' claims {} bytes, more than it can have", entry, name_, stat.size);
    }
    const std::unique_ptr<zip_file_t, int (*)(zip_file_t*)> file(
        zip_fopen_index(zip_.get(), static_cast<zip_uint64_t>(index), 0), zip_fclose);
    if (!file) fail("entry '{}' of '{}' cannot be read: {}", entry, name_, zip_strerror(zip_.get()));
    std::vector<std::byte> bytes(stat.size);
    // The last read returns 0 at the entry's end, where libzip compares the checksum.
    std::byte beyond{};
    std::size_t done = 0;
    for (;;) {
      const bool full = done == bytes.size();
      const zip_int64_t n = zip_fread(file.get(), full ? &beyond : bytes.data() + done, full ? 1 : bytes.size() - done);
      if (n < 0) fail("entry '{}' of '{}' is corrupt: {}", entry, name_, zip_file_strerror(file.get()));
      if (n == 0) break;
      done += static_cast<std::size_t>(n);
      if (done > bytes.size()) break;
    }
    if (done != bytes.size()) fail("entry '{}' of '{}' does not have the {} bytes it claims", entry, name_, bytes.size());
    return bytes;
  }

 private:
  static std::uint64_t check_magic(const std::filesystem::path& path) {
    const FileReader file(path);
    std::array<unsigned char, 4> magic{};
    if (file.size() < magic.size()) fail("'{}' is too short ({} bytes) for a torch file", path.string(), file.size());
    file.read(0, std::as_writable_bytes(std::span(magic)));
    if (magic[0] == 'P' && magic[1] == 'K') return file.size();
    if (magic[0] == 0x80) {
      fail(
          "'{}' is a bare pickle (opcode 128 at offset 0, protocol {}): the legacy torch format is not read; save it again "
          "with "
          "torch 1.6 or later",
          path.string(), magic[1]);
    }
    fail("'{}' is neither a torch zip file nor a pickle: unknown opcode {} at offset 0", path.string(), magic[0]);
  }

  struct Discard {
    void operator()(zip_t* zip) const { zip_discard(zip); }
  };
  std::string name_;
  std::uint64_t file_size_ = 0;
  std::unique_ptr<zip_t, Discard> zip_;
};

class TensorGatherer {
 public:
  explicit TensorGatherer(const StoredZip& zip) : zip_(zip), root_(zip.root()) {
    const auto order = zip.read(root_ + "/byteorder", 16);
    const std::string text = order ? std::string(reinterpret_cast<const char*>(order->data()), order->size()) : "little";
    if (text != "little" && text != "big") fail("'{}' has the unknown byte order '{}'", zip.name(), text);
    swap_ = text == "big";
  }

  [[nodiscard]] const std::string& root() const { return root_; }

  std::shared_ptr<TorchTensor> gather(const TorchView& view) {
    const std::size_t element = dtype_size(view.storage.dtype);
    const std::size_t rank = view.shape.size();
    if (view.strides.size() != rank) fail("a tensor has {} sizes but {} strides", rank, view.strides.size());
    const auto bytes = checked_bytes(view.shape, element);
    if (!bytes) fail("a tensor's size is negative or too large");
    gathered_ += *bytes;
    if (*bytes > kMaxExpansion * zip_.file_size() || gathered_ > kMaxExpansion * zip_.file_size()) {
      fail("the tensors need {} bytes, far more than the file of {} bytes holds", gathered_, zip_.file_size());
    }
    const std::vector<std::byte>& storage = load(view.storage, element);
    check_bounds(view, *bytes == 0);
    auto tensor = std::make_shared<TorchTensor>();
    tensor->dtype = view.storage.dtype;
    tensor->shape = view.shape;
    tensor->bytes.resize(*bytes);
    if (*bytes == 0) return tensor;

    // Row-major walk: an odometer over all dimensions. The stride of a dimension of one is arbitrary and never used.
    std::vector<std::int64_t> strides = view.strides;
    for (std::size_t d = 0; d < rank; ++d) {
      if (view.shape[d] == 1) strides[d] = 0;
    }
    std::vector<std::int64_t> index(rank, 0);
    std::int64_t source = view.offset;
    for (std::byte *out = tensor->bytes.data(), *end = out + tensor->bytes.size(); out != end; out += element) {
      std::memcpy(out, storage.data() + static_cast<std::size_t>(source) * element, element);
      for (std::size_t d = rank; d-- > 0;) {
        source += strides[d];
        if (++index[d] < view.shape[d]) break;
        source -= strides[d] * view.shape[d];
        index[d] = 0;
      }
    }
    return tensor;
  }

 private:
  // The largest element index touched must lie inside the storage; then strides * sizes cannot overflow either.
  static void check_bounds(const TorchView& view, bool empty) {
    if (view.offset < 0 || view.offset > view.storage.numel)
      fail("a tensor starts outside its storage of {}", view.storage.numel);
    if (empty) return;
    std::int64_t room = view.storage.numel - view.offset - 1;
    for (std::size_t d = 0; d < view.shape.size() && room >= 0; ++d) {
      const std::int64_t steps = view.shape[d] - 1;
      if (view.strides[d] < 0) fail("a tensor has a negative stride");
      if (steps == 0) continue;
      room = view.strides[d] > room / steps ? -1 : room - steps * view.strides[d];
    }
    if (room < 0) fail("a tensor's sizes and strides reach beyond its storage of {} elements", view.storage.numel);
  }

  const std::vector<std::byte>& load(const TorchStorage& storage, std::size_t element) {
    const auto key = std::make_pair(storage.key, storage.dtype);
    if (const auto found = storages_.find(key); found != storages_.end()) {
      if (found->second.size() / element != static_cast<std::uint64_t>(storage.numel))
        fail("storage '{}' changes size", storage.key);
      return found->second;
    }
    auto bytes = zip_.read(root_ + "/data/" + storage.key, zip_.file_size() - std::min(loaded_, zip_.file_size()));
    if (!bytes) fail("storage '{}' is missing from the file", storage.key);
    loaded_ += bytes->size();
    if (bytes->size() % element != 0 || bytes->size() / element != static_cast<std::uint64_t>(storage.numel)) {
      fail("storage '{}' has {} bytes, not {} elements of {}", storage.key, bytes->size(), storage.numel, element);
    }
    if (swap_) {
      for (auto at = bytes->begin(); at != bytes->end(); at += static_cast<std::ptrdiff_t>(element)) {
        std::reverse(at, at + static_cast<std::ptrdiff_t>(element));
      }
    }
    return storages_.emplace(key, std::move(*bytes)).first->second;
  }

  const StoredZip& zip_;
  std::string root_;
  bool swap_ = false;
  std::uint64_t loaded_ = 0, gathered_ = 0;
  std::map<std::pair<std::string, std::string>, std::vector<std::byte>> storages_;
};

}  // namespace

TorchValue read_torch(const std::filesystem::path& path) {
  const StoredZip zip(path);
  TensorGatherer gatherer(zip);
  const std::string entry = gatherer.root() + "/data.pkl";
  const auto pickle = zip.read(entry, kMaxPickle);
  if (!pickle) fail("entry '{}' of '{}' cannot be found", entry, zip.name());
  return unpickle(*pickle, fmt::format("'{}' ({})", zip.name(), entry),
                  [&](const TorchView& view) { return gatherer.gather(view); });
}

}  // namespace oscar
