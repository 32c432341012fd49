#include "result_store.h"

#include <fstream>
#include <span>

#include "oscar/io/files.h"
#include "oscar/io/sha256.h"

namespace oscar::cli {

std::filesystem::path ResultStore::path(const nlohmann::json& key) const {
  const std::string text = key.dump();
  return folder_ / (sha256_hex(std::as_bytes(std::span(text))) + ".json");
}

std::optional<nlohmann::json> ResultStore::find(const nlohmann::json& key) const {
  if (fresh_) return std::nullopt;
  std::ifstream file(path(key), std::ios::binary);
  if (!file) return std::nullopt;
  const nlohmann::json stored = nlohmann::json::parse(file, nullptr, false);
  if (!stored.is_object() || !stored.contains("value") || !stored.contains("key") || stored["key"] != key) return std::nullopt;
  return stored["value"];
}

void ResultStore::put(const nlohmann::json& key, const nlohmann::json& value) const {
  std::filesystem::create_directories(folder_);
  AtomicFile file(path(key));
  file.write(nlohmann::json{{"key", key}, {"value", value}}.dump());
  file.commit();
}

}  // namespace oscar::cli
