// The C entry points of moment capture, see plugin_api.h.
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "capture.h"
#include "config.h"
#include "oscar/base/error.h"
#include "plugin_api.h"

namespace oscar::llama {
namespace {

// Lives until oscar_llama_capture_end() or for ever: a thread of llama.cpp's pool may still be inside the sink when a host
// exits.
std::unique_ptr<Capture>& instance() {
  static auto* capture = new std::unique_ptr<Capture>;
  return *capture;
}

Capture& running() {
  if (!instance()) fail("capture has not begun: call oscar_llama_capture_begin first");
  return *instance();
}

std::vector<TextSource> parse_sources(const nlohmann::json& list) {
  std::vector<TextSource> sources;
  for (const nlohmann::json& source : list)
    sources.push_back({source.at("name"), source.at("sha256"), source.at("tokens").get<std::int64_t>()});
  return sources;
}

ModelMoments parse_model(const char* text) {
  if (text == nullptr) fail("capture needs a description of the model");
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) fail("the description of the model is not a JSON object");
  try {
    ModelMoments model;
    model.model_fingerprint = json.at("fingerprint");
    model.architecture = json.at("architecture");
    model.model_name = json.at("name");
    model.n_layer = json.at("n_layer");
    model.sources = parse_sources(json.at("sources"));
    return model;
  } catch (const nlohmann::json::exception& e) {
    fail("the description of the model is incomplete: {}", e.what());
  }
}

// Runs `action`; its Error becomes the sentence that the C caller gets.
template <class Action>
const char* guarded(Action&& action) {
  thread_local std::string sentence;
  try {
    action();
    return nullptr;
  } catch (const std::exception& e) {
    sentence = e.what();
    return sentence.c_str();
  }
}

}  // namespace

std::uint64_t captured_blocks() { return instance() ? instance()->blocks() : 0; }

}  // namespace oscar::llama

using namespace oscar::llama;

extern "C" {

const char* oscar_llama_capture_begin(const char* model_json, const char* resume_path) {
  return guarded([&] {
    if (config().mode != Mode::capture)
      oscar::fail("capture needs mode \"capture\", this process runs mode \"{}\"", to_string(config().mode));
    std::optional<oscar::ModelMoments> resume;
    if (resume_path != nullptr) resume = oscar::load_moments(resume_path);
    auto capture = std::make_unique<Capture>(parse_model(model_json), std::move(resume));
    set_capture_sink(capture.get());
    instance() = std::move(capture);
  });
}

const char* oscar_llama_capture_output_metric(int layer, const float* values, unsigned long long count) {
  return guarded([&] { running().set_output_metric(layer, {values, values + count}); });
}

const char* oscar_llama_capture_sequence(void) {
  return guarded([] { running().begin_sequence(); });
}

const char* oscar_llama_capture_sources(const char* json) {
  return guarded([&] {
    const nlohmann::json list = json == nullptr ? nlohmann::json() : nlohmann::json::parse(json, nullptr, false);
    if (!list.is_array()) oscar::fail("the sources of a capture are not a JSON array");
    try {
      running().set_sources(parse_sources(list));
    } catch (const nlohmann::json::exception& e) {
      oscar::fail("a source of the capture is incomplete: {}", e.what());
    }
  });
}

const char* oscar_llama_capture_end(void) {
  return guarded([] {
    set_capture_sink(nullptr);
    instance().reset();
  });
}

const char* oscar_llama_capture_save(const char* path) {
  return guarded([&] {
    if (path == nullptr || *path == '\0') oscar::fail("capture needs a path to save to");
    running().save(path);
  });
}

}  // extern "C"
