// Bytes of the paged cache: where every digit, gain and 16-bit value of a token lies. Nothing but arithmetic on constants, so
// that host and device code read the same file.
//
// CODED TIER, codec `spectral`. A page holds 64 consecutive positions of one sequence, all KV heads ascending:
//   page      = for each KV head h: head block of (16 S_h + 16 D + 128) bytes;  S_h = 2-bit slots (digits) of the head's keys,
//               a multiple of 16; D = head_dim, 64, 128 or 256. Every block starts on a multiple of 128 bytes.
//   head block= key digits [16 S_h], value digits [16 D], key gains [64], value gains [64]
// Digits stand where a tensor core wants them: a lane's four fields of a byte belong to four m16n8k32 A fragments of bytes (16
// tokens x 32 slots for keys, 16 dimensions x 32 tokens for values), so that `word & 0x03030303 << 2e` is a register of four
// unsigned bytes, code * 4^e: an operand without any conversion. The factor 4^e, of a token (keys) or of a dimension (values),
// is undone in the result.
//   Fragment of (row r, column c), r in 0 .. 15, c in 0 .. 31:  lane = 4 (r mod 8) + c mod 16 / 4,  word 2 (c / 16) + r / 8 of
//   the lane's four, byte c mod 4.
// Row of token j: j mod 16, in the first half of the page 15 - j mod 16: tokens 31 - x and 32 + x then share lane and row, and
// the sinusoids of a RoPE mean, even and odd about the page's middle, are computed once for both.
// Keys: token j, slot s: fragment row: row of j, column s mod 32, field e = j / 16.
//   byte = (s / 32) 512 + lane 16 + 4 word + s mod 4; of an odd number of 16 slots the last have two words per lane:
//   byte = (s / 16) 256 + lane 8 + 4 word + s mod 4
// Values: token j, dimension d: fragment row d mod 16, column 16 (j / 16 mod 2) + 2 (R mod 8) + R / 8, R the row of j, field
//   e = d / 16 mod 4. So the rows R and R + 8, neighbours in columns, are what a lane has of an accumulator of tokens.
//   byte = (j / 32) 8 D + (d / 64) 512 + lane 16 + 4 word + column mod 4
// Gains: byte 4 row + j / 16. Digits, their order within a head, and gains are those of codec/spectral.h (V at 2 bits).
// The values of page i of a sequence are coded with pattern i mod 4 of signs, or are zero rows: a page is summed in one basis.
//
// CODED TIER, codec `int2` (oscar/codec/int2.h, one group per head): the digits as above, every head with S_h = D slots, slot d
// the code of rotated coordinate d. Instead of gains each token has a grid of two binary16 numbers, little-endian, the step
// and then the code 0's value lo: y^ = lo + step * code. No patterns.
//   head block= key digits [16 D], value digits [16 D], key grids [64] of 4 bytes, value grids [64]: 32 D + 512 bytes
// Grids: the one of token j begins at byte 4 (4 row + j / 16), so those of a row's four tokens are 16 neighbouring bytes.
//
// EXACT TIER: blocks of 16 consecutive positions, all KV heads ascending, per head keys [16, D] then values [16, D], binary16
// in the model's basis. Rows are swizzled against bank conflicts: 16-byte piece c of row r is stored as piece c xor (r mod 8).
#pragma once

#include <cstdint>

namespace oscar::paged {

inline constexpr int kPageTokens = 64;
inline constexpr int kBlockTokens = 16;  // of the exact tier
// Of signs of values, see codec/spectral.h; a value's gain byte is its gain, 0 .. 63, and above that the pattern.
inline constexpr int kPatterns = 4;
inline constexpr int kValueGains = 64;
inline constexpr int kMaxHeadsKv = 64;

enum class PageCodec : std::uint8_t { spectral, int2 };

struct DigitPlace {
  std::uint32_t byte;  // from the start of the head's keys or values in a page
  int shift;           // of the 2-bit field in that byte
};

[[nodiscard]] constexpr std::uint32_t key_bytes(int slots) { return 16U * static_cast<std::uint32_t>(slots); }
[[nodiscard]] constexpr std::uint32_t value_bytes(int head_dim) { return 16U * static_cast<std::uint32_t>(head_dim); }
// Of the gains or grids of a head's keys, or values.
[[nodiscard]] constexpr std::uint32_t row_data_bytes(PageCodec codec) {
  return (codec == PageCodec::int2 ? 4U : 1U) * kPageTokens;
}
[[nodiscard]] constexpr std::uint32_t head_bytes(int slots, int head_dim, PageCodec codec = PageCodec::spectral) {
  return key_bytes(slots) + value_bytes(head_dim) + 2U * row_data_bytes(codec);
}
[[nodiscard]] constexpr bool head_dim_fits(int head_dim) { return head_dim == 64 || head_dim == 128 || head_dim == 256; }

[[nodiscard]] constexpr int token_row(int token) { return token < kPageTokens / 2 ? 15 - token % 16 : token % 16; }
[[nodiscard]] constexpr int token_of(int group, int row) { return 16 * group + (group < 2 ? 15 - row : row); }

// Column of a token of a pair of groups of 16 in the fragments of values.
[[nodiscard]] constexpr int value_column(int token) {
  const int row = token_row(token);
  return token / 16 % 2 * 16 + 2 * (row % 8) + row / 8;
}

[[nodiscard]] constexpr DigitPlace key_digit(int slots, int token, int slot) {
  const int row = token_row(token);
  const int lane = row % 8 * 4 + slot % 16 / 4;
  const bool paired = slot / 32 < slots / 32;
  const int at = paired ? slot / 32 * 512 + lane * 16 + slot / 16 % 2 * 8 : slot / 16 * 256 + lane * 8;
  return {static_cast<std::uint32_t>(at + row / 8 * 4 + slot % 4), token / 16 * 2};
}

[[nodiscard]] constexpr DigitPlace value_digit(int head_dim, int token, int dim) {
  const int column = value_column(token);
  const int lane = dim % 8 * 4 + column % 16 / 4;
  const int at = token / 32 * 8 * head_dim + dim / 64 * 512 + lane * 16 + column / 16 * 8 + dim % 16 / 8 * 4;
  return {static_cast<std::uint32_t>(at + column % 4), dim / 16 % 4 * 2};
}

[[nodiscard]] constexpr std::uint32_t gain_byte(int token) {
  return static_cast<std::uint32_t>(token_row(token) * 4 + token / 16);
}
[[nodiscard]] constexpr std::uint32_t grid_byte(int token) { return 4U * gain_byte(token); }

// Exact tier: index of a value from the start of a head's keys or values in a block, and values per head and block.
[[nodiscard]] constexpr std::uint32_t exact_index(int head_dim, int row, int dim) {
  return static_cast<std::uint32_t>(row * head_dim + ((dim / 8) ^ (row % 8)) * 8 + dim % 8);
}
[[nodiscard]] constexpr std::uint32_t exact_head_values(int head_dim) {
  return 2U * kBlockTokens * static_cast<std::uint32_t>(head_dim);
}

// Which positions of a sequence of n tokens its last `queries` tokens read in which tier. The query at position P reads t <= P,
// exact where t < sink or P - t < recent, coded elsewhere (cache/windows.h); sink is a multiple of 16. What these ranges hold
// is for some of the queries: between recent_begin and coded_end a position is exact for the first and coded for the last.
struct Tiers {
  int sink_end;      // [0, sink_end) exact
  int recent_begin;  // [recent_begin, n) exact
  int coded_end;     // [sink_end, coded_end) coded
  int n;
  [[nodiscard]] constexpr int sink_blocks() const { return (sink_end + kBlockTokens - 1) / kBlockTokens; }
  [[nodiscard]] constexpr int recent_blocks() const {
    return n > recent_begin ? (n - 1) / kBlockTokens - recent_begin / kBlockTokens + 1 : 0;
  }
  [[nodiscard]] constexpr int exact_blocks() const { return sink_blocks() + recent_blocks(); }
  [[nodiscard]] constexpr int first_page() const { return sink_end / kPageTokens; }
  [[nodiscard]] constexpr int pages() const {
    return coded_end > sink_end ? (coded_end - 1) / kPageTokens - first_page() + 1 : 0;
  }
  // Page i of the tier belongs to series i mod 4, whose pages share a pattern of signs. Device kernels sum the pages series by
  // series: 0, 4, 8, ..., 1, 5, 9, ...
  [[nodiscard]] constexpr int series_pages(int series) const {
    return static_cast<int>(static_cast<unsigned>(pages() + kPatterns - 1 - series) / kPatterns);
  }
  [[nodiscard]] constexpr int series_pattern(int series) const { return (first_page() + series) % kPatterns; }
  // Page of number i of that order.
  [[nodiscard]] constexpr int page_of(int i) const {
    int series = 0;
    int first = 0;  // number of the series' first page
    for (int s = 1, before = 0; s < kPatterns; ++s) {
      before += series_pages(s - 1);
      if (i < before) continue;
      series = s;
      first = before;
    }
    return series + kPatterns * (i - first);
  }
  // First position of exact block i, and its column in the block table: sink blocks first, then a ring of `ring` blocks.
  [[nodiscard]] constexpr int block_position(int i) const {
    const int sinks = sink_blocks();
    return kBlockTokens * (i < sinks ? i : recent_begin / kBlockTokens + i - sinks);
  }
};
// A walk through numbers begin .. end - 1 of the order of Tiers::page_of(), begin < end.
struct PageWalk {
  int page;  // of the tier
  int left;  // pages of its series that are still to come, itself included; not positive: the walk is over
  int more;  // in the series after it
  constexpr PageWalk(const Tiers& tiers, int begin, int end) : page(tiers.page_of(begin)), left(0), more(end - begin) {
    enter(tiers.pages());
  }
  // To the next page of the series; false: this was the last one.
  constexpr bool next() {
    page += kPatterns;
    return --left != 0;
  }
  // To the next series, of a tier of `pages`.
  constexpr void next_series(int pages) {
    page = static_cast<int>(static_cast<unsigned>(page) % kPatterns) + 1;
    enter(pages);
  }

 private:
  constexpr void enter(int pages) {
    const int here = static_cast<int>(static_cast<unsigned>(pages - page + kPatterns - 1) / kPatterns);
    left = more < here ? more : here;
    more -= left;
  }
};
[[nodiscard]] constexpr Tiers tiers_of(int n, int sink, int recent, int queries = 1) {
  const int sink_end = n < sink ? n : sink;
  const int last = n - recent;
  const int first = last - (queries - 1);
  return {sink_end, first > sink_end ? first : sink_end, last > sink_end ? last : sink_end, n};
}
// Tokens that query i of `queries` sees, its own included; not positive where the sequence is shorter.
[[nodiscard]] constexpr int seen_by(int n, int query, int queries) { return n - queries + 1 + query; }
// Least ring: as many blocks as `recent` consecutive positions can touch; of several queries, recent + queries - 1.
[[nodiscard]] constexpr int ring_blocks(int recent) { return (recent + kBlockTokens - 2) / kBlockTokens + 1; }
[[nodiscard]] constexpr int block_column(int position, int sink, int ring) {
  return position < sink ? position / kBlockTokens : sink / kBlockTokens + position / kBlockTokens % ring;
}

}  // namespace oscar::paged
