#include "oscar/io/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "oscar/base/error.h"

namespace oscar {

FileReader::FileReader(const std::filesystem::path& path) : path_(path) {
  // O_NONBLOCK: opening a FIFO must not hang before fstat can refuse it.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) fail("cannot open '{}': {}", path.string(), std::strerror(errno));
  struct stat status {};
  const bool regular = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  if (!regular) {
    ::close(descriptor_);
    fail("cannot read '{}': it is not a regular file", path.string());
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

FileReader::~FileReader() { ::close(descriptor_); }

void FileReader::read(std::uint64_t offset, std::span<std::byte> out) const {
  if (offset > size_ || out.size() > size_ - offset) {
    fail("'{}' is incomplete: {} bytes are expected at offset {} but the file has {}; fetch it again", path_.string(),
         out.size(), offset, size_);
  }
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = ::pread(descriptor_, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot read '{}': {}", path_.string(), std::strerror(errno));
    if (n == 0) fail("'{}' became shorter while it was read", path_.string());
    done += static_cast<std::size_t>(n);
  }
}

std::vector<std::byte> read_file(const std::filesystem::path& path) {
  const FileReader file(path);
  std::vector<std::byte> bytes(file.size());
  file.read(0, bytes);
  return bytes;
}

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(path) {
  static std::atomic<unsigned> counter{0};
  temporary_ = path;
  temporary_ += fmt::format(".tmp-{}-{}", ::getpid(), counter.fetch_add(1));
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    const int error = errno;
    const auto folder = path.parent_path();
    if (error == ENOENT) fail("cannot write '{}': the folder '{}' does not exist", path.string(), folder.string());
    fail("cannot write '{}': {}", path.string(), std::strerror(error));
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::write(descriptor_, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot write '{}': {}", path_.string(), std::strerror(errno));
    done += static_cast<std::size_t>(n);
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("cannot write '{}': {}", path_.string(), std::strerror(errno));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot write '{}': {}", path_.string(), std::strerror(errno));
  ::close(descriptor_);
  descriptor_ = -1;
}

}  // namespace oscar
