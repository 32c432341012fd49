#include "oscar/io/json.h"

#include <set>
#include <vector>

namespace oscar {

nlohmann::json parse_json(std::string_view text, const std::string& what) {
  constexpr int kMaxDepth = 64;
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the objects being read, outermost first
  const auto watch = [&](int depth, Event event, nlohmann::json& value) {
    if (depth > kMaxDepth) fail("{} is nested deeper than {} levels", what, kMaxDepth);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second) {
      fail("{} has the key '{}' twice", what, value.get<std::string>());
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::exception& error) {
    fail("{} is not valid JSON: {}", what, error.what());
  }
}

}  // namespace oscar
