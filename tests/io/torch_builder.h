// Builds torch files, sound or deliberately not: pickles by opcode, zips through libzip.
#pragma once

#include <zip.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "io/scratch.h"

namespace oscar::test {

class Pickle {
 public:
  explicit Pickle(int protocol = 2) : out_{'\x80', static_cast<char>(protocol)} {}
  Pickle& raw(std::string_view bytes) {
    out_ += bytes;
    return *this;
  }
  Pickle& text(const std::string& value) {
    out_ += 'X';
    append_number(out_, static_cast<std::uint32_t>(value.size()));
    out_ += value;
    return *this;
  }
  Pickle& integer(std::int32_t value) {
    out_ += 'J';
    append_number(out_, value);
    return *this;
  }
  Pickle& integers(const std::vector<std::int32_t>& values) {
    out_ += '(';
    for (const std::int32_t value : values) integer(value);
    return raw("t");
  }
  struct View {
    std::string key = "0", storage = "FloatStorage";
    std::int32_t numel = 0, offset = 0;
    std::vector<std::int32_t> shape = {}, strides = {};
  };
  Pickle& tensor(const View& view) {
    raw("ctorch._utils\n_rebuild_tensor_v2\n((")
        .text("storage")
        .raw("ctorch\n" + view.storage + "\n")
        .text(view.key)
        .text("cpu");
    integer(view.numel).raw("tQ").integer(view.offset).integers(view.shape).integers(view.strides);
    return raw("\x89").raw("ccollections\nOrderedDict\n)RtR");
  }
  [[nodiscard]] std::string stop() const { return out_ + '.'; }
  [[nodiscard]] const std::string& open() const { return out_; }

 private:
  std::string out_;
};

struct ZipOptions {
  int method = ZIP_CM_STORE;
  std::string root = "archive";
};

inline std::filesystem::path write_zip(const Scratch& scratch, const std::vector<std::pair<std::string, std::string>>& entries,
                                       const ZipOptions& options = {}) {
  const auto path = scratch.path("file.pt");
  int code = 0;
  zip_t* zip = zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &code);
  if (zip == nullptr) throw std::runtime_error("cannot make a zip file");
  for (const auto& [name, bytes] : entries) {
    zip_source_t* source = zip_source_buffer(zip, bytes.data(), bytes.size(), 0);
    const zip_int64_t index = zip_file_add(zip, (options.root + "/" + name).c_str(), source, ZIP_FL_ENC_UTF_8);
    if (index < 0 || zip_set_file_compression(zip, static_cast<zip_uint64_t>(index), options.method, 0) != 0) {
      throw std::runtime_error("cannot add to a zip file");
    }
  }
  if (zip_close(zip) != 0) throw std::runtime_error("cannot write a zip file");
  return path;
}

inline std::string floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// A file with one pickle and the storages 0, 1, ...
inline std::filesystem::path write_torch_zip(const Scratch& scratch, const std::string& pickle,
                                             const std::vector<std::string>& storages = {}, const ZipOptions& options = {}) {
  std::vector<std::pair<std::string, std::string>> entries = {{"data.pkl", pickle}};
  for (std::size_t i = 0; i < storages.size(); ++i) entries.emplace_back("data/" + std::to_string(i), storages[i]);
  entries.emplace_back("version", "3\n");
  return write_zip(scratch, entries, options);
}

}  // namespace oscar::test
