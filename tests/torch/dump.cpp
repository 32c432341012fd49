// Prints what read_torch() sees as JSON, so that a test can compare it with torch: tensors become {dtype, shape, sha256 of the
// bytes}. With --copy the value is also written again with write_torch().
#include <fmt/format.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>

#include "oscar/base/error.h"
#include "oscar/io/sha256.h"
#include "oscar/io/torch_file.h"

namespace {

nlohmann::json to_json(const oscar::TorchValue& value);

struct Visitor {
  nlohmann::json operator()(std::monostate) const { return nullptr; }
  nlohmann::json operator()(bool v) const { return v; }
  nlohmann::json operator()(std::int64_t v) const { return v; }
  nlohmann::json operator()(double v) const { return v; }
  nlohmann::json operator()(const std::string& v) const { return v; }
  nlohmann::json operator()(const std::shared_ptr<oscar::TorchTensor>& v) const {
    return {{"dtype", v->dtype}, {"shape", v->shape}, {"sha256", oscar::sha256_hex(v->bytes)}};
  }
  nlohmann::json operator()(const std::shared_ptr<oscar::TorchList>& v) const {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& item : *v) list.push_back(to_json(item));
    return list;
  }
  nlohmann::json operator()(const std::shared_ptr<oscar::TorchDict>& v) const {  // pairs: keys may be integers
    nlohmann::json pairs = nlohmann::json::array();
    for (const auto& [key, item] : *v) pairs.push_back({to_json(key), to_json(item)});
    return {{"dict", pairs}};
  }
};

nlohmann::json to_json(const oscar::TorchValue& value) { return std::visit(Visitor{}, value.data); }

}  // namespace

int main(int argc, char** argv) {
  const bool copy = argc == 4 && std::strcmp(argv[1], "--copy") == 0;
  if (argc != 2 && !copy) {
    fmt::print(stderr, "usage: oscar_torch_dump FILE | oscar_torch_dump --copy FILE NEW_FILE\n");
    return 2;
  }
  try {
    const oscar::TorchValue value = oscar::read_torch(argv[copy ? 2 : 1]);
    if (copy) oscar::write_torch(value, argv[3]);
    fmt::print("{}\n", to_json(value).dump());
    return 0;
  } catch (const oscar::Error& error) {
    fmt::print(stderr, "oscar: error: {}\n", error.what());
    return 1;
  }
}
