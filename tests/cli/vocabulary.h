// What fake tokenisers of tests share: pieces of text get numbers in order of appearance.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace oscar::cli {

class Vocabulary {
 public:
  std::int32_t id(const std::string& piece) {
    const auto [at, added] = ids_.try_emplace(piece, static_cast<std::int32_t>(pieces_.size()));
    if (added) pieces_.push_back(piece);
    return at->second;
  }
  [[nodiscard]] std::string text(const std::vector<std::int32_t>& tokens) const {
    std::string out;
    for (const std::int32_t token : tokens) out += pieces_[static_cast<std::size_t>(token)];
    return out;
  }

 private:
  std::map<std::string, std::int32_t> ids_;
  std::vector<std::string> pieces_;
};

}  // namespace oscar::cli
