// Rows that arrive one by one and are quantised in groups of consecutive positions. See oscar/rivals/rivals.h.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "oscar/base/matrix.h"

namespace oscar::rival {

class TokenGroups {
 public:
  // rows: [tokens, values] of positions first, first + 1, ...; changed in place.
  using Quantize = std::function<void(std::int64_t first, MatrixF& rows)>;
  TokenGroups(int tokens, std::size_t values, Quantize quantize);

  // Writes `row` to `out` (4 bytes per value), or, when the group is complete with it, the decoded rows of the whole group to
  // the spans that came with them. Several threads may call it. Throws Error when another row of this position is alive.
  void add(std::int64_t position, std::span<const float> row, std::span<std::uint8_t> out);

 private:
  struct Token {
    std::vector<float> row;
    std::span<std::uint8_t> out;  // empty: has not arrived
    std::size_t written = 0;      // hash of what lies there, as long as the token is alive
  };
  struct Group {
    std::vector<Token> tokens;
  };

  static void write(Token& token, std::span<const float> row);
  static bool alive(const Token& token);
  bool complete(Group& group) const;

  int tokens_;
  std::size_t values_;
  Quantize quantize_;
  std::mutex mutex_;
  std::unordered_map<std::int64_t, Group> groups_;
};

}  // namespace oscar::rival
