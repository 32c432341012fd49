#include "rivals/token_groups.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "oscar/base/error.h"

namespace oscar::rival {
namespace {

std::size_t hash_of(std::span<const std::uint8_t> bytes) {
  return std::hash<std::string_view>{}({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

}  // namespace

TokenGroups::TokenGroups(int tokens, std::size_t values, Quantize quantize)
    : tokens_(tokens), values_(values), quantize_(std::move(quantize)) {}

void TokenGroups::write(Token& token, std::span<const float> row) {
  std::memcpy(token.out.data(), row.data(), token.out.size());
  token.written = hash_of(token.out);
}

// Nobody says when a cache is cleared or a cell is given to another token. But then other bytes lie where the token was.
bool TokenGroups::alive(const Token& token) { return !token.out.empty() && hash_of(token.out) == token.written; }

bool TokenGroups::complete(Group& group) const {
  if (std::any_of(group.tokens.begin(), group.tokens.end(), [](const Token& t) { return t.out.empty(); })) return false;
  bool all = true;
  for (Token& token : group.tokens) {
    if (alive(token)) continue;
    token = Token();
    all = false;
  }
  return all;
}

void TokenGroups::add(std::int64_t position, std::span<const float> row, std::span<std::uint8_t> out) {
  if (position < 0) fail("a row of position {} cannot be put into a group of tokens", position);
  const std::lock_guard lock(mutex_);
  const std::int64_t number = position / tokens_;
  Group& group = groups_[number];
  group.tokens.resize(static_cast<std::size_t>(tokens_));
  Token& token = group.tokens[static_cast<std::size_t>(position % tokens_)];
  if (token.out.data() != out.data() && alive(token)) {
    fail(
        "position {} arrived a second time while its first row is still in use; simulated codecs that quantise groups of "
        "tokens serve one sequence at a time, without context shift",
        position);
  }
  token.row.assign(row.begin(), row.end());
  token.out = out;
  write(token, row);
  if (!complete(group)) return;
  MatrixF rows(tokens_, static_cast<Eigen::Index>(values_));
  for (Eigen::Index t = 0; t < tokens_; ++t)
    rows.row(t) = Eigen::Map<const VectorF>(group.tokens[static_cast<std::size_t>(t)].row.data(), rows.cols());
  quantize_(number * tokens_, rows);
  for (Eigen::Index t = 0; t < tokens_; ++t) {
    const VectorF decoded = rows.row(t);
    write(group.tokens[static_cast<std::size_t>(t)], {decoded.data(), values_});
  }
}

}  // namespace oscar::rival
