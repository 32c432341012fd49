// Finished measurements, kept in CACHE/eval under the digest of everything they depend on: an interrupted evaluation goes on
// where it was, and a method added later costs its own time only.
//
// One file per measurement, <SHA-256 of the key's JSON text>.json: {"key": ..., "value": ...}. The key is stored to be read by
// people and compared in full; a file that cannot be read or has another key counts as absent and is written anew.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

namespace oscar::cli {

class ResultStore {
 public:
  // `fresh`: nothing is found, but everything is still kept for later.
  ResultStore(std::filesystem::path folder, bool fresh) : folder_(std::move(folder)), fresh_(fresh) {}
  [[nodiscard]] std::optional<nlohmann::json> find(const nlohmann::json& key) const;
  void put(const nlohmann::json& key, const nlohmann::json& value) const;

 private:
  [[nodiscard]] std::filesystem::path path(const nlohmann::json& key) const;
  std::filesystem::path folder_;
  bool fresh_;
};

}  // namespace oscar::cli
