// How one row of the cache looks inside the bytes of a host's nominal 16-bit row, so that the host's own save and load
// commands, which know nothing of positions or codes, carry everything that is needed to restore the row bit for bit.
//
// A nominal row has n = n_head_kv * dim values of 2 bytes, little-endian, n >= 64. It is one of:
//
// EXACT   the binary16 row. The cache keeps the lowest mantissa bit of its first 64 values zero (round_exact_row), which
//         frees these 64 bits: value i carries bit i of the word  position | check << 28,  position in 28 bits, check in 36.
//         check = the upper 36 bits of state_hash over the position as one 64-bit word, then the row with the 64 bits zero.
//         A program that ignores all this reads a row that differs by at most one unit in the last place in 64 values.
// PACKED  a coded row. Byte offsets:
//          0   8  magic: four binary16 NaNs whose low bytes spell "OSC2", so that a program that takes the row for numbers
//                 fails visibly instead of answering from noise
//          8   4  version, 1
//         12   4  position
//         16   8  digest of the calibration artifact whose codec wrote the code
//         24   4  code bytes
//         28   4  zero
//         32   8  state_hash over bytes 0 .. 31 as four words, then the code bytes
//         40      code bytes, then zeros to the end of the row
// PLAIN   any other row: written by a program without OSCAR; its position is unknown.
//
// A damaged exact row looks plain; the importer notices because all rows of a cell must agree in kind and position.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "oscar/codec/codec.h"

namespace oscar {

inline constexpr std::size_t kMarkedValues = 64;  // values whose lowest mantissa bit is reserved
inline constexpr std::int32_t kMaxPosition = (1 << 28) - 1;
inline constexpr std::size_t kPackedHeaderBytes = 40;

enum class StateRowKind { exact, packed, plain };

struct StateRow {
  StateRowKind kind = StateRowKind::plain;
  std::int32_t position = -1;            // -1: unknown (plain)
  std::span<const std::uint8_t> code{};  // packed: points into the row
};

// Rounds [n] f32 to the row the cache stores: the first 64 values to the nearest binary16 whose lowest mantissa bit is 0, the
// others to the nearest binary16; ties to the even neighbour among the allowed values. Magnitudes beyond the largest allowed
// value (65472 or 65504) become that value and count as saturated; NaN and Inf become 0 and the row counts as sanitised.
void round_exact_row(std::span<const float> row, std::span<std::uint16_t> out, EncodeStats& stats);

// h = 0x4F53434152303031; per word w: h = (h ^ w) * 0xFF51AFD7ED558CCD, h ^= h >> 32; at the end h *= 0xC4CEB9FE1A85EC53,
// h ^= h >> 29. Bytes are taken as little-endian words of 8, the last one padded with zeros.
std::uint64_t state_hash(std::span<const std::uint64_t> words, std::span<const std::uint8_t> bytes);

// row, out: [n]. row's reserved bits are zero.
void export_exact_row(std::span<const std::uint16_t> row, std::int32_t position, std::span<std::uint16_t> out);
// out: [n] with 2 n >= 40 + code.size().
void export_coded_row(std::span<const std::uint8_t> code, std::int32_t position, std::uint64_t digest,
                      std::span<std::uint16_t> out);

// Says what a nominal row holds. Throws Error for a packed row that is damaged, of another version, of another artifact than
// `digest`, or whose code is not code_bytes long (0: exact mode, every packed row is refused).
StateRow parse_state_row(std::span<const std::uint16_t> row, std::size_t code_bytes, std::uint64_t digest);
// Copies an exact row with its reserved bits cleared.
void import_exact_row(std::span<const std::uint16_t> row, std::span<std::uint16_t> out);

}  // namespace oscar
