#include "oscar/io/sha256.h"

#include <nettle/sha2.h>

#include <algorithm>
#include <array>
#include <vector>

#include "oscar/io/files.h"

namespace oscar {

struct Sha256::Impl {
  sha256_ctx context;
};

Sha256::Sha256() : impl_(std::make_unique<Impl>()) { nettle_sha256_init(&impl_->context); }
Sha256::~Sha256() = default;

void Sha256::update(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  nettle_sha256_update(&impl_->context, bytes.size(), reinterpret_cast<const std::uint8_t*>(bytes.data()));
}

void Sha256::update(std::string_view text) { update(std::as_bytes(std::span(text))); }

std::string Sha256::hex() {
  std::array<std::uint8_t, SHA256_DIGEST_SIZE> digest{};
  nettle_sha256_digest(&impl_->context, digest.size(), digest.data());
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15U];
  }
  return text;
}

std::string sha256_hex(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex();
}

std::string sha256_file(const std::filesystem::path& path) {
  const FileReader file(path);
  Sha256 hash;
  std::vector<std::byte> buffer(std::size_t{1} << 20);
  for (std::uint64_t offset = 0; offset < file.size();) {
    const std::span chunk(buffer.data(),
                          static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), file.size() - offset)));
    file.read(offset, chunk);
    hash.update(chunk);
    offset += chunk.size();
  }
  return hash.hex();
}

}  // namespace oscar
