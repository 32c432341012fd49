#include "oscar/cache/state_row.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "base/half_rows.h"
#include "oscar/base/error.h"
#include "oscar/base/half.h"

namespace oscar {
namespace {

static_assert(std::endian::native == std::endian::little, "nominal rows are read and written as little-endian words");

constexpr std::uint16_t kLargestHalf = 0x7BFF;                                     // 65504
constexpr std::uint16_t kLargestEven = 0x7BFE;                                     // 65472
constexpr std::array<std::uint16_t, 4> kMagic = {0x7E4F, 0x7E53, 0x7E43, 0x7E32};  // NaNs: 'O' 'S' 'C' '2'
constexpr std::uint32_t kVersion = 1;
constexpr int kPositionBits = 28;
constexpr std::uint64_t kPositionMask = (std::uint64_t{1} << kPositionBits) - 1;

struct PackedHeader {
  std::array<std::uint16_t, 4> magic;
  std::uint32_t version;
  std::int32_t position;
  std::uint64_t digest;
  std::uint32_t code_bytes;
  std::uint32_t zero;
  std::uint64_t checksum;
};
static_assert(sizeof(PackedHeader) == kPackedHeaderBytes && offsetof(PackedHeader, checksum) == 32);

std::span<const std::uint8_t> as_bytes(std::span<const std::uint16_t> row) {
  return {reinterpret_cast<const std::uint8_t*>(row.data()), 2 * row.size()};
}

std::uint64_t packed_checksum(const PackedHeader& header, std::span<const std::uint8_t> code) {
  std::array<std::uint64_t, 4> words{};
  std::memcpy(words.data(), &header, 32);
  return state_hash(words, code);
}

// The 36 bits that guard an exact row; the row's reserved bits are zero.
std::uint64_t exact_check(std::span<const std::uint16_t> row, std::uint64_t position) {
  return state_hash({&position, 1}, as_bytes(row)) >> kPositionBits;
}

StateRow parse_packed(std::span<const std::uint16_t> row, std::size_t code_bytes, std::uint64_t digest) {
  const std::span<const std::uint8_t> bytes = as_bytes(row);
  PackedHeader header{};
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.version != kVersion) {
    fail("this saved state has coded rows of version {}, but this OSCAR reads version {}; save it again with this one",
         header.version, kVersion);
  }
  if (header.code_bytes > bytes.size() - sizeof header) {
    fail("this saved state is damaged: a coded row claims {} bytes", header.code_bytes);
  }
  const auto code = bytes.subspan(sizeof header, header.code_bytes);
  const auto rest = bytes.subspan(sizeof header + header.code_bytes);
  if (packed_checksum(header, code) != header.checksum || header.zero != 0 || header.position < 0 ||
      header.position > kMaxPosition || std::any_of(rest.begin(), rest.end(), [](std::uint8_t b) { return b != 0; })) {
    fail("this saved state is damaged: the checksum of a coded row does not match");
  }
  if (code_bytes == 0) {
    fail("this saved state has coded rows, but this cache runs in exact mode; load the artifact, or process the text again");
  }
  if (header.digest != digest) {
    fail(
        "this saved state was made with calibration artifact {:016x}, but {:016x} is loaded; load that artifact, or process "
        "the text again",
        header.digest, digest);
  }
  if (header.code_bytes != code_bytes) {
    fail("this saved state has coded rows of {} bytes, but this codec's rows have {}", header.code_bytes, code_bytes);
  }
  return {StateRowKind::packed, header.position, code};
}

}  // namespace

void round_exact_row(std::span<const float> row, std::span<std::uint16_t> out, EncodeStats& stats) {
  const std::size_t marked = std::min(kMarkedValues, row.size());
  if (float_to_even_half(row.data(), marked, half_to_float(kLargestEven), out.data()) &&
      float_to_half(row.data() + marked, row.size() - marked, half_to_float(kLargestHalf), out.data() + marked)) {
    return;
  }
  // Something is too large or not a number: value by value.
  bool finite = true;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const float value = row[i];
    if (!std::isfinite(value)) {
      finite = false;
      out[i] = 0;
      continue;
    }
    const float magnitude = std::fabs(value);
    const std::uint16_t largest = i < kMarkedValues ? kLargestEven : kLargestHalf;
    const std::uint16_t half =
        i < kMarkedValues ? round_to_even_mantissa(magnitude) : std::min(float_to_half(magnitude), largest);
    if (magnitude > half_to_float(largest)) ++stats.saturated;
    out[i] = static_cast<std::uint16_t>(half | (std::signbit(value) ? 0x8000U : 0U));
  }
  if (!finite) ++stats.sanitised;
}

std::uint64_t state_hash(std::span<const std::uint64_t> words, std::span<const std::uint8_t> bytes) {
  std::uint64_t h = 0x4F53434152303031U;
  const auto add = [&h](std::uint64_t word) {
    h = (h ^ word) * 0xFF51AFD7ED558CCDU;
    h ^= h >> 32;
  };
  for (const std::uint64_t word : words) add(word);
  while (!bytes.empty()) {
    const std::size_t n = std::min<std::size_t>(8, bytes.size());
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), n);
    add(word);
    bytes = bytes.subspan(n);
  }
  h *= 0xC4CEB9FE1A85EC53U;
  return h ^ (h >> 29);
}

void export_exact_row(std::span<const std::uint16_t> row, std::int32_t position, std::span<std::uint16_t> out) {
  const auto p = static_cast<std::uint64_t>(position);
  const std::uint64_t word = p | (exact_check(row, p) << kPositionBits);
  std::copy(row.begin(), row.end(), out.begin());
  for (std::size_t i = 0; i < kMarkedValues; ++i) out[i] = static_cast<std::uint16_t>(row[i] | ((word >> i) & 1U));
}

void export_coded_row(std::span<const std::uint8_t> code, std::int32_t position, std::uint64_t digest,
                      std::span<std::uint16_t> out) {
  PackedHeader header{kMagic, kVersion, position, digest, static_cast<std::uint32_t>(code.size()), 0, 0};
  header.checksum = packed_checksum(header, code);
  std::fill(out.begin(), out.end(), std::uint16_t{0});
  auto* bytes = reinterpret_cast<std::uint8_t*>(out.data());
  std::memcpy(bytes, &header, sizeof header);
  std::memcpy(bytes + sizeof header, code.data(), code.size());
}

StateRow parse_state_row(std::span<const std::uint16_t> row, std::size_t code_bytes, std::uint64_t digest) {
  if (row.size() < kMarkedValues) fail("a saved row has {} values; at least {} are needed", row.size(), kMarkedValues);
  if (std::equal(kMagic.begin(), kMagic.end(), row.begin())) return parse_packed(row, code_bytes, digest);
  // A single damaged byte of the magic must not turn a packed row into numbers.
  if (std::any_of(row.begin(), row.begin() + kMagic.size(), [](std::uint16_t h) { return (h & 0x7C00U) == 0x7C00U; })) {
    fail("this saved state is damaged: a row begins with NaN or Inf");
  }
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < kMarkedValues; ++i) word |= static_cast<std::uint64_t>(row[i] & 1U) << i;
  static thread_local std::vector<std::uint16_t> bare;
  bare.resize(row.size());
  import_exact_row(row, bare);
  const std::uint64_t position = word & kPositionMask;
  if (exact_check(bare, position) != word >> kPositionBits) return {};
  return {StateRowKind::exact, static_cast<std::int32_t>(position), {}};
}

void import_exact_row(std::span<const std::uint16_t> row, std::span<std::uint16_t> out) {
  std::copy(row.begin(), row.end(), out.begin());
  for (std::size_t i = 0; i < kMarkedValues; ++i) out[i] = static_cast<std::uint16_t>(row[i] & 0xFFFEU);
}

}  // namespace oscar
