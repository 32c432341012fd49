#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace oscar {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void update(std::span<const std::byte> bytes);
  void update(std::string_view text);
  [[nodiscard]] std::string hex();  // lower case; ends the computation

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

std::string sha256_hex(std::span<const std::byte> bytes);
std::string sha256_file(const std::filesystem::path& path);

}  // namespace oscar
