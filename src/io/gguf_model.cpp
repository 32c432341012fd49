// What a GGUF file says about the model's attention, and what identifies its weights.
#include <algorithm>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/io/gguf.h"
#include "oscar/io/sha256.h"

namespace oscar {
namespace {

constexpr std::int64_t kMaxLayers = 65536, kMaxSize = std::int64_t{1} << 24;
constexpr std::uint32_t kTypeF32 = 0;

// Numbers render alike whatever width the converter stored them in.
std::string render(const GgufValue& value) {
  struct Visitor {
    std::string operator()(std::uint64_t v) const { return fmt::format("{}", v); }
    std::string operator()(std::int64_t v) const { return fmt::format("{}", v); }
    std::string operator()(double v) const { return fmt::format("{}", static_cast<float>(v)); }
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(const std::string& v) const { return v; }
    std::string operator()(const GgufArray& v) const {
      std::string text = "[";
      for (const GgufValue& element : v) text += render(element) + ",";
      return text + "]";
    }
  };
  return std::visit(Visitor{}, value.data);
}

class ModelReader {
 public:
  explicit ModelReader(const Gguf& file) : file_(file), name_(file.path().string()) {
    const auto architecture = file.text("general.architecture");
    if (!architecture || architecture->empty()) fail("'{}' does not name its architecture (general.architecture)", name_);
    architecture_ = *architecture;
  }

  GgufModel model() {
    GgufModel model;
    model.architecture = architecture_;
    model.name = file_.text("general.name").value_or("");
    n_layer_ = required("block_count", kMaxLayers);
    model.n_layer = static_cast<int>(n_layer_);
    n_embd_ = required("embedding_length", kMaxSize);
    model.n_embd = static_cast<int>(n_embd_);
    model.n_ctx_train = static_cast<int>(size("context_length", INT32_MAX).value_or(0));
    const std::vector<std::int64_t> heads = per_layer("attention.head_count");
    const std::vector<std::int64_t> heads_kv = has("attention.head_count_kv") ? per_layer("attention.head_count_kv") : heads;
    const std::vector<bool> windows = sliding_windows();
    const bool scalar = !is_array("attention.head_count") && !is_array("attention.head_count_kv");
    for (std::size_t i = 0; i < heads.size(); ++i) {
      if (heads_kv[i] == 0 && !scalar) continue;  // a layer without attention of a hybrid model
      model.layers.push_back(shape(static_cast<int>(i), heads[i], heads_kv[i], windows[i]));
    }
    if (model.layers.empty()) fail("'{}' has no layer with attention", name_);
    model.fingerprint = fingerprint();
    return model;
  }

 private:
  [[nodiscard]] std::string key(const std::string& suffix) const { return architecture_ + "." + suffix; }
  [[nodiscard]] bool has(const std::string& suffix) const { return file_.metadata().contains(key(suffix)); }
  [[nodiscard]] bool is_array(const std::string& suffix) const {
    const auto found = file_.metadata().find(key(suffix));
    return found != file_.metadata().end() && std::holds_alternative<GgufArray>(found->second.data);
  }

  [[nodiscard]] std::optional<std::int64_t> size(const std::string& suffix, std::int64_t maximum) const {
    const auto value = file_.integer(key(suffix));
    if (value && (*value < 0 || *value > maximum))
      fail("'{}' of '{}' is {}, outside 0..{}", key(suffix), name_, *value, maximum);
    return value;
  }

  [[nodiscard]] std::int64_t required(const std::string& suffix, std::int64_t maximum) const {
    const auto value = size(suffix, maximum);
    if (!value) fail("'{}' has no '{}'", name_, key(suffix));
    if (*value == 0) fail("'{}' of '{}' is 0", key(suffix), name_);
    return *value;
  }

  // A number for all layers, or an array with one number per layer.
  [[nodiscard]] std::vector<std::int64_t> per_layer(const std::string& suffix) const {
    if (!is_array(suffix)) return std::vector<std::int64_t>(static_cast<std::size_t>(n_layer_), required(suffix, kMaxSize));
    const auto& array = std::get<GgufArray>(file_.metadata().at(key(suffix)).data);
    if (array.size() != static_cast<std::size_t>(n_layer_)) {
      fail("'{}' of '{}' has {} entries for {} layers", key(suffix), name_, array.size(), n_layer_);
    }
    std::vector<std::int64_t> values;
    for (const GgufValue& element : array) {
      const auto* u = std::get_if<std::uint64_t>(&element.data);
      const auto* i = std::get_if<std::int64_t>(&element.data);
      const bool sound =
          (u != nullptr && *u <= static_cast<std::uint64_t>(kMaxSize)) || (i != nullptr && *i >= 0 && *i <= kMaxSize);
      if (!sound) fail("'{}' of '{}' holds an entry that is not a size", key(suffix), name_);
      values.push_back(u != nullptr ? static_cast<std::int64_t>(*u) : *i);
    }
    return values;
  }

  [[nodiscard]] std::vector<bool> sliding_windows() const {
    std::vector<bool> windows(static_cast<std::size_t>(n_layer_), false);
    if (is_array("attention.sliding_window") || size("attention.sliding_window", INT32_MAX).value_or(0) == 0) return windows;
    const std::string pattern_key = "attention.sliding_window_pattern";
    if (is_array(pattern_key)) {
      const auto& array = std::get<GgufArray>(file_.metadata().at(key(pattern_key)).data);
      if (array.size() != windows.size()) fail("'{}' of '{}' has {} entries", key(pattern_key), name_, array.size());
      for (std::size_t i = 0; i < windows.size(); ++i) {
        const std::string text = render(array[i]);
        if (text != "true" && text != "false" && text != "0" && text != "1") {
          fail("'{}' of '{}' holds '{}', not a flag", key(pattern_key), name_, text);
        }
        windows[i] = text == "true" || text == "1";
      }
      return windows;
    }
    // The period: every period-th layer attends to everything.
    const auto period = size(pattern_key, kMaxLayers);
    if (!period && architecture_ != "gemma3") return windows;
    const auto n = static_cast<std::size_t>(period.value_or(6));
    for (std::size_t i = 0; i < windows.size(); ++i) windows[i] = n == 0 || i % n + 1 < n;
    return windows;
  }

  [[nodiscard]] LayerShape shape(int layer, std::int64_t heads, std::int64_t heads_kv, bool sliding) const {
    if (heads == 0) fail("layer {} of '{}' has an attention.head_count of 0", layer, name_);
    if (heads_kv == 0 || heads % heads_kv != 0) {
      fail("layer {} of '{}': {} query heads cannot be shared by {} KV heads", layer, name_, heads, heads_kv);
    }
    LayerShape shape;
    shape.layer = layer;
    shape.n_head = static_cast<int>(heads);
    shape.n_head_kv = static_cast<int>(heads_kv);
    shape.k_dim = head_dim(layer, "attention.key_length", heads, sliding);
    shape.v_dim = head_dim(layer, "attention.value_length", heads, sliding);
    shape.sliding_window = sliding;
    return shape;
  }

  [[nodiscard]] int head_dim(int layer, const std::string& suffix, std::int64_t heads, bool sliding) const {
    if (sliding && has(suffix + "_swa")) return static_cast<int>(required(suffix + "_swa", kMaxSize));
    if (has(suffix)) return static_cast<int>(required(suffix, kMaxSize));
    if (n_embd_ % heads != 0) {
      fail("layer {} of '{}': embedding length {} does not divide by {} heads and '{}' is not given", layer, name_, n_embd_,
           heads, key(suffix));
    }
    return static_cast<int>(n_embd_ / heads);
  }

  [[nodiscard]] std::string fingerprint() const {
    Sha256 hash;
    hash.update("architecture=" + architecture_ + "\n");
    const std::string rope = key("rope.");
    for (const auto& [name, value] : file_.metadata()) {  // ascending by key
      const bool counts = name == key("block_count") || name == key("embedding_length") ||
                          name == key("attention.head_count") || name == key("attention.head_count_kv") ||
                          name == key("attention.key_length") || name == key("attention.value_length");
      if (counts || name.starts_with(rope)) hash.update(name + "=" + render(value) + "\n");
    }
    std::vector<const GgufTensorInfo*> vectors;
    for (const GgufTensorInfo& tensor : file_.tensors()) {
      if (tensor.shape.size() == 1 && tensor.type == kTypeF32) vectors.push_back(&tensor);
    }
    std::sort(vectors.begin(), vectors.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
    for (const GgufTensorInfo* tensor : vectors) {
      hash.update(tensor->name + "\n");
      hash.update(file_.read(*tensor));
    }
    return hash.hex();
  }

  const Gguf& file_;
  std::string name_, architecture_;
  std::int64_t n_layer_ = 0, n_embd_ = 0;
};

}  // namespace

GgufModel describe_model(const Gguf& file) { return ModelReader(file).model(); }

}  // namespace oscar
