#include "program.h"

#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string_view>
#include <vector>

#include "oscar/base/error.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

class MappedFile {
 public:
  explicit MappedFile(const fs::path& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) fail("{} cannot be read: {}", path.string(), std::strerror(errno));
    struct stat status {};
    if (fstat(file, &status) == 0 && status.st_size > 0) {
      size_ = static_cast<std::size_t>(status.st_size);
      void* address = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
      if (address == MAP_FAILED)
        size_ = 0;
      else
        data_ = address;
    }
    close(file);
  }
  ~MappedFile() {
    if (data_ != nullptr) munmap(data_, size_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  [[nodiscard]] std::string_view bytes() const { return {static_cast<const char*>(data_), data_ == nullptr ? 0 : size_}; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

bool has_interpreter(std::string_view bytes) {
  Elf64_Ehdr header;
  if (bytes.size() < sizeof header) return false;
  std::memcpy(&header, bytes.data(), sizeof header);
  for (std::size_t i = 0; i < header.e_phnum; ++i) {
    const std::size_t at = header.e_phoff + i * header.e_phentsize;
    Elf64_Phdr segment;
    if (header.e_phentsize < sizeof segment || at > bytes.size() || bytes.size() - at < sizeof segment) return false;
    std::memcpy(&segment, bytes.data() + at, sizeof segment);
    if (segment.p_type == PT_INTERP) return true;
  }
  return false;
}

// The loader's own list of libraries (what ldd prints); the program itself does not run.
std::string loader_listing(const fs::path& path) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return "";
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    if (const int null = open("/dev/null", O_WRONLY); null >= 0) dup2(null, STDERR_FILENO);
    setenv("LD_TRACE_LOADED_OBJECTS", "1", 1);
    execl(path.c_str(), path.c_str(), nullptr);
    _exit(127);
  }
  close(ends[1]);
  std::string out;
  std::array<char, 4096> buffer{};
  for (ssize_t n = 0; child > 0 && (n = read(ends[0], buffer.data(), buffer.size())) > 0;)
    out.append(buffer.data(), static_cast<std::size_t>(n));
  close(ends[0]);
  if (child > 0) waitpid(child, nullptr, 0);
  return out;
}

}  // namespace

fs::path find_program(const std::string& name) {
  const auto runnable = [](const fs::path& path) { return fs::is_regular_file(path) && access(path.c_str(), X_OK) == 0; };
  if (name.find('/') != std::string::npos) {
    if (!fs::exists(name)) fail("there is no program {}", name);
    if (!runnable(name)) fail("{} is not an executable file", name);
    return name;
  }
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "/usr/bin:/bin" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    fs::path candidate = fs::path(folder.empty() ? "." : folder) / name;
    if (runnable(candidate)) return candidate;
  }
  fail("there is no program {} in PATH", name);
}

ProgramFacts examine(const fs::path& path) {
  ProgramFacts facts;
  facts.path = path;
  const MappedFile file(path);
  const std::string_view bytes = file.bytes();
  facts.elf = bytes.size() > EI_CLASS && bytes.substr(0, SELFMAG) == ELFMAG;
  if (!facts.elf) return facts;
  if (bytes[EI_CLASS] != ELFCLASS64) fail("{} is a 32-bit program; OSCAR works in 64-bit ones", path.string());
  facts.static_elf = !has_interpreter(bytes);
  if (!facts.static_elf) facts.loads_ggml = loader_listing(path).find("libggml") != std::string::npos;
  facts.carries_ggml = !facts.loads_ggml && bytes.find("ggml_backend_") != std::string_view::npos;
  return facts;
}

}  // namespace oscar::cli
