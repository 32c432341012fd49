// JSON from files that may be broken: strict parsing, and field access whose errors are sentences.
#pragma once

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "oscar/base/error.h"

namespace oscar {

// Refuses what nlohmann::json::parse accepts silently: duplicate keys, nesting deeper than 64. Error starts with `what`.
nlohmann::json parse_json(std::string_view text, const std::string& what);

// Fields of an object; `what` names the object in the error ("layer 3 of model.oscar.safetensors").
inline const nlohmann::json& json_field(const nlohmann::json& object, const char* key, std::string_view what) {
  if (!object.is_object()) fail("{} is not a JSON object", what);
  const auto found = object.find(key);
  if (found == object.end()) fail("{} has no '{}'", what, key);
  return *found;
}

inline std::int64_t json_integer(const nlohmann::json& object, const char* key, std::string_view what,
                                 std::int64_t minimum = std::numeric_limits<std::int64_t>::min(),
                                 std::int64_t maximum = std::numeric_limits<std::int64_t>::max()) {
  const nlohmann::json& value = json_field(object, key, what);
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() ||
                     value.get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  if (!fits) fail("'{}' of {} is not an integer", key, what);
  const auto integer = value.get<std::int64_t>();
  if (integer < minimum || integer > maximum) fail("'{}' of {} is {}, outside {}..{}", key, what, integer, minimum, maximum);
  return integer;
}

// A non-negative int: counts, layer numbers, dimensions.
inline int json_count(const nlohmann::json& object, const char* key, std::string_view what) {
  return static_cast<int>(json_integer(object, key, what, 0, std::numeric_limits<int>::max()));
}

inline double json_number(const nlohmann::json& object, const char* key, std::string_view what) {
  const nlohmann::json& value = json_field(object, key, what);
  if (!value.is_number()) fail("'{}' of {} is not a number", key, what);
  const auto number = value.get<double>();
  if (!std::isfinite(number)) fail("'{}' of {} is not finite", key, what);
  return number;
}

inline float json_float(const nlohmann::json& object, const char* key, std::string_view what) {
  const double number = json_number(object, key, what);
  if (std::abs(number) > static_cast<double>(std::numeric_limits<float>::max())) {
    fail("'{}' of {} is {}, too large for a float", key, what, number);
  }
  return static_cast<float>(number);
}

inline bool json_bool(const nlohmann::json& object, const char* key, std::string_view what) {
  const nlohmann::json& value = json_field(object, key, what);
  if (!value.is_boolean()) fail("'{}' of {} is not true or false", key, what);
  return value.get<bool>();
}

inline const std::string& json_text(const nlohmann::json& object, const char* key, std::string_view what) {
  const nlohmann::json& value = json_field(object, key, what);
  if (!value.is_string()) fail("'{}' of {} is not a string", key, what);
  return value.get_ref<const std::string&>();
}

inline const nlohmann::json& json_array(const nlohmann::json& object, const char* key, std::string_view what) {
  const nlohmann::json& value = json_field(object, key, what);
  if (!value.is_array()) fail("'{}' of {} is not a list", key, what);
  return value;
}

}  // namespace oscar
