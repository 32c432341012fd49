// A folder that lives as long as a test, and what the tests of file readers share.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "oscar/base/error.h"

namespace oscar::test {

class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "oscar-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
    folder_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] std::filesystem::path path(const std::string& name) const { return folder_ / name; }
  [[nodiscard]] std::filesystem::path write(const std::string& name, std::string_view bytes) const {
    std::ofstream out(path(name), std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!out.flush()) throw std::runtime_error("cannot write a temporary file");
    return path(name);
  }

 private:
  std::filesystem::path folder_;
};

inline std::string slurp(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

// The message of the Error that `action` throws. Anything else (no error, another exception) fails the test.
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_STRNE(error.what(), "");
    return error.what();
  }
  ADD_FAILURE() << "no error was reported";
  return {};
}

inline void append_raw(std::string& out, const void* data, std::size_t size) {
  out.append(static_cast<const char*>(data), size);
}
template <class T>
void append_number(std::string& out, T value) {
  append_raw(out, &value, sizeof(value));
}

struct MutationCounts {
  int accepted = 0, refused = 0;
};

// Damages `valid` in many ways: each of the bytes [0, header) set to other values, each truncation inside [0, header) and a
// byte too many. `read` must return or throw Error; every other outcome (crash, other exception, sanitizer) fails the test.
inline MutationCounts mutate(const Scratch& scratch, const std::string& valid, std::size_t header,
                             const std::function<void(const std::filesystem::path&)>& read) {
  MutationCounts counts;
  const auto attempt = [&](const std::string& bytes) {
    const auto path = scratch.write("mutated", bytes);
    try {
      read(path);
      ++counts.accepted;
    } catch (const Error& error) {
      EXPECT_STRNE(error.what(), "");
      ++counts.refused;
    }
  };
  for (std::size_t i = 0; i < std::min(header, valid.size()); ++i) {
    const auto original = static_cast<unsigned char>(valid[i]);
    const auto flip = [&](unsigned mask) { return static_cast<unsigned char>(original ^ mask); };
    for (const unsigned char replacement : {flip(0x01), flip(0x80), flip(0xFF), static_cast<unsigned char>(0)}) {
      if (replacement == original) continue;
      std::string bytes = valid;
      bytes[i] = static_cast<char>(replacement);
      attempt(bytes);
    }
    attempt(valid.substr(0, i));
  }
  attempt(valid + '\0');
  return counts;
}

}  // namespace oscar::test
