// Whole files in, whole files out. Every failure is an Error naming the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

// Only regular files are read: their size is known beforehand, so it can cap every count a header claims.
class FileReader {
 public:
  explicit FileReader(const std::filesystem::path& path);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  [[nodiscard]] std::uint64_t size() const { return size_; }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  // Exactly out.size() bytes from `offset`; Error when the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

std::vector<std::byte> read_file(const std::filesystem::path& path);

// Bytes go to a temporary beside `path`, which commit() flushes to disk and renames. Without commit() nothing changes.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  int descriptor_ = -1;
};

}  // namespace oscar
