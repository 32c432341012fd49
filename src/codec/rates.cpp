#include "oscar/codec/rates.h"

#include <algorithm>
#include <charconv>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr const char* kForm = "use LAYERS:RATE[,...], as in 0:3,1:3/2.5,5-7:k3, or none";

[[noreturn]] void refuse(std::string_view entry, const std::string& why) { fail("layer_bits: '{}' {}; {}", entry, why, kForm); }

int layer_number(std::string_view text, std::string_view entry) {
  int number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0 || number > kMaxRatedLayer)
    refuse(entry, fmt::format("names the layer '{}'", text));
  return number;
}

double rate_of(std::string_view text, std::string_view entry) {
  const std::optional<double> rate = find_rate(text);
  if (!rate) refuse(entry, fmt::format("gives '{}' bits, but only {} exist", text, rate_names()));
  return *rate;
}

// Layer and rates of "LAYERS:RATE"; `layer` is the first one.
struct Entry {
  LayerRates rates;
  int last = 0;
};

Entry parse_entry(std::string_view text) {
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos) refuse(text, "has no colon");
  const std::string_view layers = text.substr(0, colon);
  const std::string_view rate = text.substr(colon + 1);
  Entry entry;
  const std::size_t dash = layers.find('-');
  entry.rates.layer = layer_number(layers.substr(0, dash), text);
  entry.last = dash == std::string_view::npos ? entry.rates.layer : layer_number(layers.substr(dash + 1), text);
  if (entry.last < entry.rates.layer) refuse(text, "is a range that ends before it begins");
  const std::size_t slash = rate.find('/');
  if (slash != std::string_view::npos) {
    entry.rates.k = rate_of(rate.substr(0, slash), text);
    entry.rates.v = rate_of(rate.substr(slash + 1), text);
  } else if (rate.starts_with('k')) {
    entry.rates.k = rate_of(rate.substr(1), text);
  } else if (rate.starts_with('v')) {
    entry.rates.v = rate_of(rate.substr(1), text);
  } else {
    entry.rates.k = entry.rates.v = rate_of(rate, text);
  }
  return entry;
}

std::string rate_text(const LayerRates& rates) {
  if (!rates.k) return fmt::format("v{}", *rates.v);
  if (!rates.v) return fmt::format("k{}", *rates.k);
  return *rates.k == *rates.v ? fmt::format("{}", *rates.k) : fmt::format("{}/{}", *rates.k, *rates.v);
}

}  // namespace

std::string rate_names() {
  return fmt::format("{} or {}", fmt::join(kSpectralRates.begin(), kSpectralRates.end() - 1, ", "), kSpectralRates.back());
}

bool is_rate(double bits) { return std::find(kSpectralRates.begin(), kSpectralRates.end(), bits) != kSpectralRates.end(); }

std::optional<double> find_rate(std::string_view text) {
  double bits = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bits);
  if (error != std::errc() || end != text.data() + text.size() || !is_rate(bits)) return std::nullopt;
  return bits;
}

std::vector<LayerRates> parse_layer_rates(std::string_view text) {
  std::vector<LayerRates> layers;
  if (text == "none") return layers;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, comma - begin);
    const Entry entry = parse_entry(part);
    for (int layer = entry.rates.layer; layer <= entry.last; ++layer) {
      auto at = std::lower_bound(layers.begin(), layers.end(), layer, [](const LayerRates& l, int n) { return l.layer < n; });
      if (at == layers.end() || at->layer != layer) at = layers.insert(at, {layer, std::nullopt, std::nullopt});
      for (const auto half : {&LayerRates::k, &LayerRates::v}) {
        if (!(entry.rates.*half)) continue;
        if ((*at).*half) {
          refuse(part, fmt::format("gives layer {} a second rate for {}", layer, half == &LayerRates::k ? "K" : "V"));
        }
        (*at).*half = entry.rates.*half;
      }
    }
    begin = comma + 1;
  }
  return layers;
}

std::string to_text(std::span<const LayerRates> layers) {
  std::string text;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t j = i + 1;
    while (j < layers.size() && layers[j].layer == layers[j - 1].layer + 1 && layers[j].k == layers[i].k &&
           layers[j].v == layers[i].v)
      ++j;
    if (!text.empty()) text += ',';
    text += fmt::format("{}", layers[i].layer);
    if (j > i + 1) text += fmt::format("-{}", layers[j - 1].layer);
    text += fmt::format(":{}", rate_text(layers[i]));
    i = j;
  }
  return text.empty() ? "none" : text;
}

}  // namespace oscar
