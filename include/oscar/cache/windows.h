// Which rows stay at 16 bit: the first `sink` positions of a sequence and the last `recent` before (and including) the query.
#pragma once

#include <cstdint>

namespace oscar {

struct Windows {
  std::int32_t sink = 64;
  std::int32_t recent = 256;
  // Exact copies are kept this much longer than `recent` so that rolling back up to `rollback` tokens (rejected drafts,
  // regenerated answers) finds its window complete. Does not change which rows a query reads as exact.
  std::int32_t rollback = 64;

  // By POSITION in the sequence: never by cell index, batch or chunk. A query at position p sees exactly the rows
  // p - recent + 1 .. p (itself included) and 0 .. sink - 1 at 16 bit; everything else is coded.
  [[nodiscard]] constexpr bool exact(std::int64_t row_position, std::int64_t query_position) const {
    return row_position < sink || query_position - row_position < recent;
  }
  // Whether an exact copy must be kept when the newest position of its sequence is `newest`.
  [[nodiscard]] constexpr bool keep(std::int64_t row_position, std::int64_t newest) const {
    return row_position < sink || newest - row_position < static_cast<std::int64_t>(recent) + rollback;
  }
};

}  // namespace oscar
